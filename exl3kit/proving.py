"""Proving that a gang serves: a real completion, while no rank ends; and the error when it does not.

`/health` and exit codes are not believed: vLLM's rank 0 ends with 0 when its peer has died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from exl3kit import asking, containers, post_mortem
from exl3kit.errors import ExitCode, KitError
from exl3kit.faults import printable

if TYPE_CHECKING:
    from exl3kit.asking import Answer
    from exl3kit.containers import Standing
    from exl3kit.recipe import Recipe

LOOK_SECONDS = 0.5  # how often the containers are looked at while the first answer is waited for
TELL_SECONDS = 5.0  # how often the ranks are asked what they do meanwhile
SHOWN = 120  # characters of a log line that are shown while a rank starts
FINAL_WORDS = 3  # lines of a dead rank's log that go into the error's sentence


def prove(
    standing: Sequence[Standing], recipe: Recipe, *, deadline_s: float, say: Callable[[str], None] | None = None
) -> Answer:
    """A real completion from the served model, while no rank has ended or was started again by its engine.

    Parameters
    ----------
    say: is told now and then what the ranks do meanwhile.

    Raises `KitError` when a rank ends first (with the rank's own exit code when it refused by itself), when no
    completion comes before the deadline, or when what comes is none.
    """
    before = {one.rank: one.restarts for one in standing}
    question: Future[Answer] = Future()
    threading.Thread(target=put, args=(question, standing[0], recipe, deadline_s), daemon=True).start()
    if say is not None:
        threading.Thread(target=narrate, args=(standing, say, question), daemon=True).start()
    while not wait([question], LOOK_SECONDS).done:
        refuse_ended(standing, before)
    if question.exception() is not None:
        time.sleep(LOOK_SECONDS)  # an ended container takes its processes along before the engine calls it ended
    refuse_ended(standing, before)
    answer = question.result()
    refusal = answer.refusal()
    if refusal is not None:
        raise no_service(standing, f"no completion from {recipe.served_name}", refusal)
    return answer


def narrate(standing: Sequence[Standing], say: Callable[[str], None], question: Future[Answer]) -> None:
    """Tell what the ranks do, until the question is answered."""
    while not wait([question], TELL_SECONDS).done:
        try:
            with ThreadPoolExecutor(max_workers=len(standing)) as pool:
                reports = list(pool.map(asking.report, standing))
        except KitError:
            continue  # one has just ended, which `prove` finds out for itself
        states = ", ".join(f"rank {report['rank']} {report['state']}" for report in reports)
        say("; ".join(part for part in (states, latest_word(standing[0])) if part))


def latest_word(one: Standing) -> str:
    """The last line of a rank's log, where vLLM tells how far it has loaded; empty when it cannot be had."""
    from docker.errors import DockerException
    from requests import RequestException

    try:
        lines = [" ".join(line.split()) for line in containers.tail(one, 3)]
    except (DockerException, RequestException, OSError):
        return ""
    told = [line for line in lines if line and not post_mortem.is_whole(line)]
    return printable(told[-1], SHOWN) if told else ""


def put(question: Future[Answer], head: Standing, recipe: Recipe, deadline_s: float) -> None:
    """Ask the probe; its answer or failure goes into `question`."""
    probe = recipe.probe
    try:
        question.set_result(
            asking.complete(head, recipe.served_name, probe.prompt, probe.max_tokens, wait_s=deadline_s)
        )
    except BaseException as error:  # whatever it is belongs to who waits
        question.set_exception(error)


def refuse_ended(standing: Sequence[Standing], before: Mapping[int, int]) -> None:
    """Raise `KitError` when a rank has ended since its engine had restarted it `before` times; the first is named."""
    ended = []
    for one in standing:
        containers.look_again(one)
        if one.state != "running" or one.restarts > before[one.rank]:
            ended.append(one)
    if not ended:
        return
    death = last_death(standing)
    if death is None:
        culprit = min(ended, key=lambda one: str(one.container.attrs["State"]["FinishedAt"]))
        exit_code = containers.last_exit_code(culprit)
        what, words = f"rank {culprit.rank} ended with exit code {exit_code}", {}
    else:
        first, records = death["first"], death["records"]
        culprit = next((one for one in standing if one.rank == first["rank"]), ended[0])
        exit_code = records.get(str(first["rank"]), {}).get("exit_code")
        what = f"rank {first['rank']}: {first['sentence']}"
        words = {int(rank): list(record.get("lines") or ()) for rank, record in records.items()}
    raise no_service(standing, what, None, culprit, refused(exit_code), words)


def last_death(standing: Sequence[Standing]) -> dict[str, Any] | None:
    """What the ranks wrote of the end of this generation; None when none could."""
    generation = standing[0].label("generation")
    found = [told for one in standing if (told := post_mortem.of(one)) is not None]
    return post_mortem.choose(told for told in found if told["deployment_generation"] == generation)


def refused(exit_code: int | None) -> ExitCode | None:
    """The kit's own exit code, when a rank refused with one of those before it served."""
    return ExitCode(exit_code) if exit_code in (ExitCode.PREFLIGHT, ExitCode.VERIFICATION) else None


def no_service(
    standing: Sequence[Standing],
    what: str,
    why: str | None,
    culprit: Standing | None = None,
    code: ExitCode | None = None,
    words: Mapping[int, list[str]] | None = None,
) -> KitError:
    """The error for a gang that does not serve, with the last log lines of every rank.

    `words`: by rank, what it logged before it ended; where that is not known, the end of its log now.
    """
    culprit = culprit or standing[0]
    logs = {one.rank: (words or {}).get(one.rank) or last_words(one) for one in standing}
    last = [line for line in logs[culprit.rank] if line.strip()][-FINAL_WORDS:]
    shown = "\n".join(f"  rank {one.rank} on {one.node.name} | {line}" for one in standing for line in logs[one.rank])
    return KitError(
        what,
        where=f"node {culprit.node.name}",
        why=why or "its last words: " + " / ".join(last),
        next_step=f"the last lines of each rank:\n{shown}",
        code=code or ExitCode.SERVING,
    )


def last_words(one: Standing) -> list[str]:
    """The end of a rank's log, or why it cannot be had: a failure is told also when half of it is out of reach."""
    from docker.errors import APIError

    try:
        with containers.answering(one.node):
            return [line for line in containers.tail(one) if not post_mortem.is_whole(line)]
    except (KitError, APIError) as error:
        return [f"(no log: {error})"]
