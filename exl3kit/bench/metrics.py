"""The server's metrics as figures: read with Prometheus' own parser, and a missing or senseless one is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
FINISHED = "vllm:request_success_total"
PROMPT, GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
HITS, EXTERNAL_HITS = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
TTFT_SUM, QUEUE_SUM = "vllm:time_to_first_token_seconds_sum", "vllm:request_queue_time_seconds_sum"
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
CACHE = "vllm:cache_config_info"


class Missing(Exception):
    """A figure that is not there, or is no number."""


@dataclass(frozen=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """Samples of a text in Prometheus' format; raises `Missing` when it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, IndexError, KeyError) as error:
        raise Missing(f"the metrics cannot be read: {error}") from error
    return [Sample(one.name, one.labels, one.value) for family in families for one in family.samples]


class Scrape:
    """One look at the metrics."""

    def __init__(self, text: str) -> None:
        self.samples = parse(text)

    def total(self, name: str, **labels: str) -> float:
        """Sum over all engines of the samples called `name` that have `labels`; raises `Missing`."""
        found = [
            one.value
            for one in self.samples
            if one.name == name and all(one.labels.get(key) == value for key, value in labels.items())
        ]
        shown = name + "".join(f'{{{key}="{value}"}}' for key, value in labels.items())
        if not found:
            raise Missing(f"{shown} is missing")
        total = sum(found)
        if not math.isfinite(total):
            raise Missing(f"{shown} is {total}")
        return total

    def label(self, name: str, key: str) -> str | None:
        """A label of the first sample called `name`, or None."""
        return next((one.labels.get(key) for one in self.samples if one.name == name), None)


class Window:
    """What moved between two looks."""

    def __init__(self, before: str, after: str) -> None:
        self.before, self.after = Scrape(before), Scrape(after)

    def delta(self, name: str, **labels: str) -> float:
        """How far a counter went; raises `Missing` when it is absent, no number, or went backwards (a restart)."""
        moved = self.after.total(name, **labels) - self.before.total(name, **labels)
        if moved < 0:
            raise Missing(f"{name} went backwards by {-moved:g}: the server was restarted")
        return moved
