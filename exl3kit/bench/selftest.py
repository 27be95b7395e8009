"""`kit bench selftest`: whatever the bench must refuse is put before it, and it must refuse each for the right reason.

Recorded: observations of a real vLLM 0.32.0, whole (they must count) and with one thing changed at a time. Live: the
same faults told by a real server over HTTP. A gate that has never been seen to fail proves nothing.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit.bench import ab, campaign, gate, metrics, paced, plans, summaries
from exl3kit.bench.places import Here
from exl3kit.bench.targets import Target
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.bench.paced import Pace
    from exl3kit.bench.plans import Step

RECORDED = Path(__file__).with_name("recorded.jsonl")
PACE = paced.Pace(rate=4000.0)
NEEDED = (
    metrics.RUNNING, metrics.WAITING, metrics.HITS, metrics.EXTERNAL_HITS, metrics.BY_SOURCE, metrics.PREEMPTIONS,
    metrics.PROMPT, metrics.GENERATED, metrics.FINISHED,
)  # fmt: skip

Observation = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One thing put before the gate. wanted: a word that the refusal must hold; None: it must count."""

    name: str
    how: str
    wanted: str | None
    reasons: list[str]

    @property
    def held(self) -> bool:
        if self.wanted is None:
            return not self.reasons
        return any(self.wanted in reason for reason in self.reasons)


# Recorded -------------------------------------------------------------------------------------------------------------


def recorded() -> dict[str, Observation]:
    """The shipped observations by name."""
    lines = RECORDED.read_text(encoding="utf-8").splitlines()
    return {found.pop("name"): found for found in map(json.loads, lines)}


def sample(text: str, name: str, value: str | None) -> str:
    """Metrics with every sample of a name given another value, or taken out."""
    kept = []
    for line in text.splitlines():
        if line.startswith(name + "{"):
            if value is None:
                continue
            line = line.rpartition(" ")[0] + " " + value
        kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def added(text: str, name: str, more: float, label: str = "") -> str:
    """Metrics with `more` added to the samples of a name that hold `label`."""

    def grown(match: re.Match[str]) -> str:
        return match[1] + str(float(match[2]) + more) if label in match[1] else match[0]

    return re.sub(rf"^({re.escape(name)}\{{.*\}} )(\S+)$", grown, text, flags=re.MULTILINE)


def faults_of_a_row() -> Iterator[tuple[str, str, Callable[[Observation], None]]]:
    """Every change of a good observation that must make it refused: what it is, a word of the refusal, the change."""

    def metric(when: str, change: Callable[[str], str]) -> Callable[[Observation], None]:
        def apply(row: Observation) -> None:
            row[when] = change(row[when])

        return apply

    for name in NEEDED:
        yield f"{name} is missing", name, metric("after", lambda text, n=name: sample(text, n, None))  # type: ignore[misc]
        yield f"{name} was missing before", name, metric("before", lambda text, n=name: sample(text, n, None))  # type: ignore[misc]
        yield f"{name} is NaN", "nan", metric("after", lambda text, n=name: sample(text, n, "NaN"))  # type: ignore[misc]
    yield "no metrics at all", "missing", lambda row: row.update(after="")
    yield "metrics that cannot be read", "cannot be read", lambda row: row.update(after="vllm:x{ 1\n")
    yield "a warm-up row", "warm-up", lambda row: row["step"].update(warmup=True)
    yield "usage is missing", "usage", lambda row: row["requests"][0].update(usage=None)
    yield (
        "cached_tokens is missing",
        "cached_tokens",
        lambda row: row["requests"][0]["usage"].update(prompt_tokens_details=None),
    )
    yield "another prompt length", "were meant", lambda row: row["step"].update(tokens=row["step"]["tokens"] + 1)
    yield "fewer tokens generated", "were generated", lambda row: row["step"].update(max_tokens=9)
    yield "no time of a first token", "time", lambda row: row["requests"][0].update(times=[])
    yield "a time that is NaN", "no number", lambda row: row["requests"][0].update(times=[float("nan")])
    yield "a first token before the request", "follow", lambda row: row["requests"][0].update(times=[-1.0])
    yield "an error in the stream", "status", lambda row: row["requests"][0].update(error="broken off")
    yield "no request", "no request", lambda row: row.update(requests=[])
    for name, more, label, word, told in (
        (metrics.PROMPT, 7, "", "foreign", "a foreign request's prompt"),
        (metrics.FINISHED, 1, "length", "foreign", "a foreign request that ended"),
        (metrics.GENERATED, 3, "", "foreign", "a foreign request's tokens"),
        (metrics.HITS, 16, "", "prefix cache", "a hit in the prefix cache alone"),
        (metrics.EXTERNAL_HITS, 16, "", "external", "a hit in an external cache"),
        (metrics.BY_SOURCE, 16, "local_cache_hit", "local cache", "tokens of the local cache"),
        (metrics.BY_SOURCE, 16, "external_kv", "another server", "tokens of another server"),
        (metrics.BY_SOURCE, 16, "local_compute", "were computed", "more computed than sent"),
        (metrics.PREEMPTIONS, 1, "", "preempted", "a preemption"),
        (metrics.RUNNING, 1, "", "idle", "somebody's request still runs"),
        (metrics.HITS, -1e9, "", "backwards", "a counter that went backwards: a restart"),
    ):
        yield told, word, metric("after", lambda text, n=name, m=more, x=label: added(text, n, m, x))  # type: ignore[misc]
    yield "somebody's request waited before", "idle", metric("before", lambda text: added(text, metrics.WAITING, 1))


def of_recorded() -> Iterator[Case]:
    """Good rows count, the recorded hit and warm-up do not, and neither does any changed row."""
    rows = recorded()
    for name in ("cold", "decode", "streams"):
        yield Case(f"a good row ({name})", "recorded", None, gate.judge(rows[name]).reasons)
    yield Case("a cache hit", "recorded", "cache", gate.judge(rows["hit"]).reasons)
    yield Case("a warm-up row", "recorded", "warm-up", gate.judge(rows["warm-up"]).reasons)
    for name, word, change in faults_of_a_row():
        row = copy.deepcopy(rows["cold"])
        change(row)
        yield Case(name, "recorded", word, gate.judge(row).reasons)


def of_campaigns() -> Iterator[Case]:
    """Campaigns of good rows that prove nothing all the same."""
    rows = recorded()
    good = [copy.deepcopy(rows["cold"]) for _ in range(5)]
    slow = copy.deepcopy(rows["cold"])
    slow["requests"][0]["times"] = [time * 2 for time in slow["requests"][0]["times"]]
    passed = copy.deepcopy(rows["cold"])
    passed["step"]["planted"] = "repetition"

    def told(observations: Sequence[Observation]) -> list[str]:
        return summaries.faults(summaries.judged(observations), max_cv=0.15)

    yield Case("a campaign of five good rows", "recorded", None, told([*good, rows["hit"]]))
    yield Case("four rows", "recorded", "the least", told(good[:4]))
    yield Case("a row twice as slow", "recorded", "varies", told([*good, slow]))
    yield Case("a planted hit that counts", "recorded", "not refused", told([*good, passed]))
    yield Case("a hit among the samples", "recorded", "cache", told([*good, {**rows["hit"], "step": good[0]["step"]}]))
    boots = [{"number": n, "arm": arm, "environment": {"cpus": n}} for n, arm in enumerate("ABA")]
    yield Case("boots on other machines", "recorded", "differs", ab.unequal(boots, ()))


# Live -----------------------------------------------------------------------------------------------------------------

LIVE: Mapping[str, tuple[str | None, Pace]] = {
    "an honest server": (None, PACE),
    "a foreign request in every window": ("foreign", replace(PACE, foreign=True)),
    "somebody's request runs all the time": ("idle", replace(PACE, busy=True)),
    "preempted requests": ("preempted", replace(PACE, preempt=True)),
    "no cached_tokens in the stream": ("cached_tokens", replace(PACE, lack="cached_tokens")),
    "no prefix_cache_hits": ("missing", replace(PACE, lack=metrics.HITS)),
    "prompt_tokens_by_source is NaN": ("nan", replace(PACE, nan=metrics.BY_SOURCE)),
}


def of_live() -> Iterator[Case]:
    """The faults that a server can tell, over HTTP."""
    for name, (wanted, pace) in LIVE.items():
        with paced.running(pace) as url:
            rows = seen(Target(Here(url)), plans.prefill([96], 1, campaign.salt()))
        yield Case(name, "live, paced", wanted, gate.judge(rows[1]).reasons)
        if wanted is None:
            yield Case("a repeated prompt", "live, paced", "cache", gate.judge(rows[-1]).reasons)


def of_server(target: Target) -> Iterator[Case]:
    """A server that serves a model: cold rows, a repeated prompt, and somebody else's request beside ours."""
    where = f"live, {target.place.name}"
    rungs = plans.ladder(target.max_model_len)[:1]
    longest = [min(1024, target.max_model_len - 1)]
    rows = seen(target, plans.prefill(longest, 1, campaign.salt()))
    yield Case("a warm-up row", where, "warm-up", gate.judge(rows[0]).reasons)
    yield Case("a cold row", where, None, gate.judge(rows[1]).reasons)
    if summaries.has_prefix_cache(rows[2]):
        yield Case("a repeated prompt", where, "cache", gate.judge(rows[2]).reasons)
    with somebody_else(target):
        beside = [row for row in seen(target, plans.prefill(rungs, 3, campaign.salt())) if summaries.is_sample(row)]
    reasons = [reason for row in beside for reason in gate.judge(row).reasons]
    word = "foreign" if any("foreign" in reason for reason in reasons) else "idle"
    yield Case("somebody else's requests beside ours", where, word, reasons)


def seen(target: Target, steps: Sequence[Step]) -> list[Observation]:
    job = {"do": "observe", "model": target.model, "text": campaign.text(), "steps": list(steps)}
    return list(target.place.run(job))


@contextmanager
def somebody_else(target: Target, tokens: int = 16, answer: int = 32) -> Iterator[None]:
    """Requests of another client, one after the other, while the body runs."""
    done, begun = threading.Event(), threading.Event()
    steps: list[Step] = [
        {"kind": "prose", "salt": f"{campaign.salt()}{n}", "tokens": tokens, "max_tokens": answer} for n in range(500)
    ]

    def ask() -> None:
        for _ in target.place.run({"do": "observe", "model": target.model, "text": campaign.text(), "steps": steps}):
            begun.set()
            if done.is_set():
                return

    other = threading.Thread(target=ask, daemon=True)
    other.start()
    begun.wait(60)
    try:
        yield
    finally:
        done.set()
        other.join(60)


def refusal(cases: Sequence[Case]) -> KitError | None:
    """The error (benchmark) when anything was not judged as it must be."""
    wrong = [case for case in cases if not case.held]
    if not wrong:
        return None
    first = wrong[0]
    what = "was not refused" if not first.reasons else "was refused for another reason"
    return KitError(
        f"{first.name} ({first.how}) " + ("does not count" if first.wanted is None else what),
        where="kit bench selftest",
        why="; ".join(first.reasons) or None,
        next_step=f"{len(wrong)} of {len(cases)} cases failed: trust no figure of this kit",
        code=ExitCode.BENCHMARK,
    )
