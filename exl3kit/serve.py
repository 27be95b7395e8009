"""Serving: bring a recipe up on its nodes, prove that it answers, and take it down again.

The state of a deployment is its containers' labels and nothing else, so any machine that reaches the nodes may ask.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl3kit import asking, containers, facts, image, lock, node_files, ports, receipts
from exl3kit import deployment as plans
from exl3kit import weights as weight_files
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from pathlib import Path

    from exl3kit.asking import Answer
    from exl3kit.containers import Standing
    from exl3kit.deployment import Deployment, NodeFacts
    from exl3kit.lock import Lock
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe
    from exl3kit.weights import Weights

READY_SECONDS = 1800.0  # loading 164 GiB from one disk and compiling takes this long at worst
LOOK_SECONDS = 0.5  # how often the containers are looked at while the first answer is waited for
FINAL_WORDS = 3  # lines of a dead rank's log that go into the error's sentence


@dataclass(frozen=True)
class Serving:
    """A deployment that has answered a real completion."""

    deployment: Deployment
    standing: list[Standing]
    answer: Answer
    receipts: list[dict[str, Any]]
    started: bool  # False: it was serving already

    @property
    def head(self) -> Standing:
        return self.standing[0]

    @property
    def url(self) -> str:
        """Where the API is, as seen on the head's node."""
        return f"http://127.0.0.1:{self.deployment.port}/v1"


@dataclass(frozen=True)
class Ground:
    """What a deployment stands on: the lock, the weights, the nodes in use (head first) and their facts."""

    recipe: Recipe
    lock: Lock
    weights: Weights
    nodes: list[Node]
    facts: Mapping[str, NodeFacts]
    placement: list[str]

    def plan(self, generation: str) -> Deployment:
        """The deployment on this ground."""
        folders = {
            node.name: weight_files.directory_on(node, self.facts[node.name], self.weights) for node in self.nodes
        }
        key = self.recipe.serve.api_key_file is not None
        return plans.plan(self.recipe, self.lock.stamp, self.placement, self.facts, folders, generation, api_key=key)


def new_generation() -> str:
    """A name for a new incarnation of a gang: UTC to the microsecond, so that later ones sort later."""
    now = time.time()
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"


def survey(recipe: Recipe, nodes: Sequence[Node]) -> Ground:
    """Look at everything that a deployment depends on, without changing anything.

    Raises `KitError` for weights that are not whole, nodes that do not fit the recipe, or pins that are unknown.
    """
    weights = weight_files.survey(recipe)
    locked = lock.make_lock(recipe)
    asked = facts.gather(nodes)
    placement = plans.place(recipe, [asked[node.name] for node in nodes])
    used = [node for node in nodes if node.name in placement]
    return Ground(recipe, locked, weights, used, asked, placement)


def up(recipe: Recipe, nodes: Sequence[Node], progress: Progress, *, ready_s: float = READY_SECONDS) -> Serving:
    """Bring a recipe up; nothing happens when exactly this already serves.

    What was started is taken away again when it does not come to serve, whatever the reason, Ctrl-C included.

    Raises `KitError`: preflight, build, verification, or serving.
    """
    with progress.stage("look at nodes and weights"):
        ground = survey(recipe, nodes)
        deployment = ground.plan(new_generation())
    standing = containers.find(ground.nodes, deployment.name)
    if is_serving(standing, deployment):
        try:
            with progress.stage("ask what already serves"):
                answer = prove(standing, recipe, deadline_s=asking.ANSWER_SECONDS)
                return Serving(deployment, standing, answer, proven_receipts(standing, ground), started=False)
        except KitError as silent:
            progress.tell(f"what stands there does not serve and is started anew: {silent.what}")
    check_ports(ground, deployment)
    key = api_key(recipe)
    prepare(ground, progress)
    if standing:
        with progress.stage("stop the deployment that stood before"):
            containers.take_down(ground.nodes, deployment.name)
    with removed_on_failure(ground.nodes, deployment):
        with progress.stage("start the ranks"):
            containers.take_down(ground.nodes, deployment.name)  # a network may be left of a kit that was killed
            standing = start(ground, deployment, key)
        with progress.stage("first answer") as stage:
            answer = prove(standing, recipe, deadline_s=ready_s)
            stage.conclude(f"API up after {answer.waited:.1f} s")
        with progress.stage("receipts"):
            counted = proven_receipts(standing, ground)
    return Serving(deployment, standing, answer, counted, started=True)


def prepare(ground: Ground, progress: Progress) -> None:
    """Bring image and weights to every node."""
    image.ensure(ground.recipe, ground.lock, ground.nodes, progress=progress)
    stopped = threading.Event()
    with progress.stage("weights", total=ground.weights.size * len(ground.nodes)) as stage:

        def advance(count: int) -> None:
            if stopped.is_set():
                raise OSError("interrupted")
            stage.advance(count)

        with ThreadPoolExecutor(max_workers=len(ground.nodes)) as pool:
            brought = [
                pool.submit(weight_files.bring, node, ground.facts[node.name], ground.weights, ground.lock.tag, advance)
                for node in ground.nodes
            ]
            try:
                wait(brought)
            except BaseException:  # Ctrl-C: copies end at their next megabyte instead of their last
                stopped.set()
                raise
        stage.conclude(
            ", ".join(f"{node.name} {one.result()}" for node, one in zip(ground.nodes, brought, strict=True))
        )


def check_ports(ground: Ground, deployment: Deployment) -> None:
    """Refuse a taken port before gigabytes are copied and before anything that runs is stopped."""
    ports.require_free(ground.nodes[0], deployment.ports, spare=deployment.name)


def api_key(recipe: Recipe) -> str | None:
    """The key in the recipe's file; refused when it cannot be one."""
    path = recipe.serve.api_key_file
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise KitError(
            "the API key cannot be read", where=str(path), why=str(error), code=ExitCode.PREFLIGHT
        ) from error
    if not key or not key.isprintable() or " " in key:
        raise KitError(
            "this is no API key",
            where=str(path),
            why="it is empty, or holds blanks",
            next_step=f"`openssl rand -hex 32 > {path}`",
            code=ExitCode.PREFLIGHT,
        )
    return key


def is_serving(standing: Sequence[Standing], deployment: Deployment) -> bool:
    """Whether exactly this deployment runs: every rank, of one generation, from the same files and image."""
    if [one.rank for one in standing] != [rank.rank for rank in deployment.ranks]:
        return False
    generations = {one.label("generation") for one in standing}
    same = all(one.label("spec") == deployment.spec and one.state == "running" for one in standing)
    return same and len(generations) == 1


@contextmanager
def removed_on_failure(nodes: Sequence[Node], deployment: Deployment) -> Iterator[None]:
    """Take the deployment's generation away when the body fails or is interrupted, undisturbed by a second Ctrl-C."""
    try:
        yield
    except BaseException as failure:
        with undisturbed():
            try:
                containers.take_down(nodes, deployment.name, generation=deployment.generation, grace=0)
            except KitError as left:
                raise with_remains(failure, left) from failure
        raise


def with_remains(failure: BaseException, left: KitError) -> KitError:
    """The failure of a start after which a node could not be cleared, saying both."""
    if not isinstance(failure, KitError):
        return left
    steps = [failure.next_step, f"what was started could not be removed everywhere: {left}"]
    next_step = "\n  ".join(step for step in steps if step)
    return KitError(failure.what, where=failure.where, why=failure.why, next_step=next_step, code=failure.code)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM for a moment (only the main thread can; elsewhere they do not arrive)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(ground: Ground, deployment: Deployment, key: str | None) -> list[Standing]:
    """Create every rank on its node, then start them, rank 0 first: it listens for the others.

    A rank 1 that starts 25 s before rank 0 makes vLLM's start 60 s instead of 28.
    """
    by_name = {node.name: node for node in ground.nodes}
    key_file = deployment.ranks[0].api_key_file
    if key is not None and key_file is not None:
        node_files.put_secret(by_name[deployment.ranks[0].node], deployment.image, key_file, key)
    made = [one for node in ground.nodes for one in containers.create(node, deployment)]
    made.sort(key=lambda one: one.rank)
    for one in made:
        containers.start(one, deployment)
    return made


def prove(standing: Sequence[Standing], recipe: Recipe, *, deadline_s: float) -> Answer:
    """A real completion from the served model, while no rank has ended.

    Raises `KitError` when a rank ends first (with the rank's own exit code when it refused by itself), when no
    completion comes before the deadline, or when what comes is none.
    """
    question: Future[Answer] = Future()
    threading.Thread(target=put, args=(question, standing[0], recipe, deadline_s), daemon=True).start()
    while not wait([question], LOOK_SECONDS).done:
        refuse_ended(standing)
    if question.exception() is not None:
        time.sleep(LOOK_SECONDS)  # an ended container takes its processes along before the engine calls it ended
    refuse_ended(standing)
    answer = question.result()
    refusal = answer.refusal()
    if refusal is not None:
        raise no_service(standing, f"no completion from {recipe.served_name}", refusal)
    return answer


def put(question: Future[Answer], head: Standing, recipe: Recipe, deadline_s: float) -> None:
    """Ask the probe; its answer or failure goes into `question`."""
    probe = recipe.probe
    try:
        question.set_result(
            asking.complete(head, recipe.served_name, probe.prompt, probe.max_tokens, wait_s=deadline_s)
        )
    except BaseException as error:  # whatever it is belongs to who waits
        question.set_exception(error)


def refuse_ended(standing: Sequence[Standing]) -> None:
    """Raise `KitError` when a rank has ended; the one that ended first is named."""
    ended = []
    for one in standing:
        containers.look_again(one)
        if one.state != "running":
            ended.append(one)
    if not ended:
        return
    first = min(ended, key=lambda one: str(one.container.attrs["State"]["FinishedAt"]))
    code = ExitCode(first.exit_code) if first.exit_code in (ExitCode.PREFLIGHT, ExitCode.VERIFICATION) else None
    raise no_service(standing, f"rank {first.rank} ended with exit code {first.exit_code}", None, first, code)


def no_service(
    standing: Sequence[Standing],
    what: str,
    why: str | None,
    culprit: Standing | None = None,
    code: ExitCode | None = None,
) -> KitError:
    """The error for a gang that does not serve; `detail` of it holds the last log lines of every rank."""
    culprit = culprit or standing[0]
    logs = {f"rank {one.rank} on {one.node.name}": last_words(one) for one in standing}
    last = [line for line in logs[f"rank {culprit.rank} on {culprit.node.name}"] if line.strip()][-FINAL_WORDS:]
    shown = "\n".join(f"  {rank} | {line}" for rank, lines in logs.items() for line in lines)
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
            return containers.tail(one)
    except (KitError, APIError) as error:
        return [f"(no log: {error})"]


def proven_receipts(standing: Sequence[Standing], ground: Ground) -> list[dict[str, Any]]:
    """The receipts of all ranks, after they were found to add up."""
    counted = receipts.collect(standing)
    receipts.verify(counted, ground.recipe, ground.weights)
    return counted


def render_files(recipe: Recipe, nodes: Sequence[Node], out: Path) -> tuple[Deployment, list[Path]]:
    """Write the files of a deployment without starting anything."""
    from exl3kit import render

    deployment = survey(recipe, nodes).plan(new_generation())
    return deployment, render.write(deployment, out)
