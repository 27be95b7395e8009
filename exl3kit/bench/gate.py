"""The cold gate: whether an observation counts. Pure, and closed: what is not known is a reason to refuse.

A published table of cold prefill was withdrawn because its runs had hit the prefix cache. So a row counts only if four
independent counts agree that every prompt token was computed here, if the engine was idle before and after, and if
nobody else's request fell into the window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from exl3kit.bench import metrics
from exl3kit.bench.metrics import Missing, Window


@dataclass(frozen=True)
class Verdict:
    """What an observation is worth. With `reasons` it counts for nothing; the figures are then None where unknown.

    computed: prompt tokens that the server computed. ttft: seconds from the first request's start to the first token
    (of a group: the latest first token). prefill: computed tokens per second of `ttft`. decode: generated tokens per
    second after the first token; of a group: all its tokens over the time from start to end.
    """

    reasons: list[str] = field(default_factory=list)
    computed: int | None = None
    ttft: float | None = None
    prefill: float | None = None
    decode: float | None = None
    generated: int | None = None
    acceptance: float | None = None
    server_ttft: float | None = None
    queued: float | None = None

    @property
    def counts(self) -> bool:
        return not self.reasons


def judge(observation: Mapping[str, Any]) -> Verdict:
    """The verdict on one observation, as `exl3kit.bench.observer` wrote it."""
    reasons = list(_faults_of_requests(observation))
    try:
        window = Window(observation["before"], observation["after"])
    except (Missing, KeyError, TypeError) as error:
        return Verdict([*reasons, _told(error)])
    reasons += _faults_of_window(observation, window)
    return Verdict(reasons, **_figures(observation, window))


def _faults_of_requests(observation: Mapping[str, Any]) -> Iterator[str]:
    step, requests = observation.get("step") or {}, observation.get("requests") or []
    if step.get("warmup"):
        yield "it is a warm-up, which no sample may hold"
    if not requests:
        yield "it holds no request"
    for request in requests:
        if request.get("status") != 200 or request.get("error"):
            yield f"a request ended with status {request.get('status')}: {request.get('error')}"
            continue
        usage = request.get("usage") or {}
        asked, said = step.get("tokens"), usage.get("prompt_tokens")
        if said is None or usage.get("completion_tokens") is None:
            yield "usage is missing in the stream"
            continue
        if asked is not None and said != asked:
            yield f"the prompt had {said} tokens and {asked} were meant"
        if usage["completion_tokens"] != step.get("max_tokens"):
            yield f"{usage['completion_tokens']} tokens were generated and {step.get('max_tokens')} were meant"
        yield from _faults_of_cached(usage)
        yield from _faults_of_times(request)


def _faults_of_cached(usage: Mapping[str, Any]) -> Iterator[str]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        yield "usage.prompt_tokens_details.cached_tokens is missing (serve with --enable-prompt-tokens-details)"
    elif cached != 0:
        yield f"{cached} prompt tokens came from the cache (cached_tokens)"


def _faults_of_times(request: Mapping[str, Any]) -> Iterator[str]:
    times = [request.get("sent"), *(request.get("times") or [None])]
    if any(not isinstance(time, int | float) or not math.isfinite(time) for time in times):
        yield "a time of the stream is missing or no number"
    elif times[0] < 0 or times[1] <= times[0] or times[1:] != sorted(times[1:]):
        yield "the times of the stream do not follow each other"


def _faults_of_window(observation: Mapping[str, Any], window: Window) -> Iterator[str]:
    requests = observation.get("requests") or []
    usages = [request.get("usage") or {} for request in requests]
    prompt, generated = (sum(usage.get(key) or 0 for usage in usages) for key in ("prompt_tokens", "completion_tokens"))
    checks: tuple[tuple[str, dict[str, str], int, str], ...] = (
        (metrics.HITS, {}, 0, "prompt tokens hit the prefix cache"),
        (metrics.EXTERNAL_HITS, {}, 0, "prompt tokens hit an external cache"),
        (metrics.BY_SOURCE, {"source": "local_cache_hit"}, 0, "prompt tokens came from the local cache"),
        (metrics.BY_SOURCE, {"source": "external_kv_transfer"}, 0, "prompt tokens came from another server's cache"),
        (metrics.BY_SOURCE, {"source": "local_compute"}, prompt, f"prompt tokens were computed and {prompt} were sent"),
        (metrics.PREEMPTIONS, {}, 0, "requests were preempted"),
        (metrics.PROMPT, {}, prompt, f"prompt tokens were served and {prompt} are ours"),
        (metrics.GENERATED, {}, generated, f"tokens were generated and {generated} are ours"),
        (metrics.FINISHED, {}, len(requests), f"requests ended and {len(requests)} are ours"),
    )  # fmt: skip
    for name, labels, wanted, sentence in checks:
        try:
            moved = window.delta(name, **labels)
        except Missing as error:
            yield str(error)
            continue
        if moved != wanted:
            foreign = ": a foreign request" if moved > wanted and "ours" in sentence else ""
            yield f"{moved:g} {sentence}{foreign}"
    for when, scrape in (("before", window.before), ("after", window.after)):
        for name, word in ((metrics.RUNNING, "running"), (metrics.WAITING, "waiting")):
            try:
                if count := scrape.total(name):
                    yield f"{count:g} requests were {word} {when} it: the engine was not idle"
            except Missing as error:
                yield str(error)


def _figures(observation: Mapping[str, Any], window: Window) -> dict[str, Any]:
    """Every figure that can be had; one that cannot has been a reason already, or is only told (queue, acceptance)."""
    found: dict[str, Any] = {}
    requests = observation.get("requests") or []
    try:
        computed = int(window.delta(metrics.BY_SOURCE, source="local_compute"))
        generated = sum(int(request["usage"]["completion_tokens"]) for request in requests)
        sent = min(request["sent"] for request in requests)
        firsts, lasts = [request["times"][0] for request in requests], [request["times"][-1] for request in requests]
        ttft = max(firsts) - sent
        found |= {"computed": computed, "generated": generated, "ttft": ttft, "prefill": computed / ttft}
        if len(requests) == 1 and generated > 1:
            found["decode"] = (generated - 1) / (lasts[0] - firsts[0])
        elif len(requests) > 1:
            found["decode"] = generated / (max(lasts) - sent)
    except (Missing, KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
        pass
    for name, counter in (("server_ttft", metrics.TTFT_SUM), ("queued", metrics.QUEUE_SUM)):
        found[name] = _delta_or_none(window, counter)
    drafts, accepted = _delta_or_none(window, metrics.DRAFTS), _delta_or_none(window, metrics.ACCEPTED)
    if drafts and accepted is not None:
        found["acceptance"] = 1 + accepted / drafts
    return found


def _delta_or_none(window: Window, name: str) -> float | None:
    try:
        return window.delta(name)
    except Missing:
        return None


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, Missing) else f"the metrics of the observation are missing ({error!r})"
