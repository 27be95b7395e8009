"""Plans of campaigns: which prompts, of how many tokens, in which order. Pure; a step is what the observer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exl3kit.errors import KitError

LADDER = (8_192, 16_384, 32_768, 65_536, 100_000, 200_000, 300_000)
LEAST = 5  # observations of a rung
STREAM_TOKENS, STREAM_RUNS = 256, 3
PROMPT_TOKENS = 64  # before decode at several streams
WORDS_ROOM = 128  # tokens that are left for a salt and `WORDS`, with a tokenizer that knows few words

WORDS = {
    "structured": "A JSON array of twenty objects, each with the keys id, name, colour and price, and nothing else:\n",
    "prose": "An unhurried description of a harbour at dawn, in full sentences and without any dialogue:\n",
}

Step = dict[str, Any]  # `least`: how many observations of its rung must count


def ladder(max_model_len: int, asked: Sequence[int] = ()) -> list[int]:
    """Prompt lengths of a prefill campaign: the asked ones, or those of `LADDER` that the model takes.

    A model too short for all of them gets a quarter, a half and the whole of its length. Raises `KitError` for a rung
    that does not fit.
    """
    longest = max_model_len - 1  # one token is generated
    for rung in asked:
        if not 1 <= rung <= longest:
            raise KitError(f"a prompt of {rung} tokens does not fit", where="--rungs",
                           why=f"the model takes prompts of 1 to {longest} tokens")  # fmt: skip
    fitting = [rung for rung in LADDER if rung <= longest]
    return sorted(set(asked)) or fitting or sorted({max(1, longest // 4), max(1, longest // 2), longest})


def prefill(rungs: Sequence[int], count: int, salt: str, least: int = LEAST) -> list[Step]:
    """Per rung one warm-up, then `count` rounds over all rungs, then a repetition of the last prompt.

    Rounds, so that what drifts (heat, other work) meets every rung alike. The repetition must hit the prefix cache and
    be refused: it proves that the gate can fail.
    """
    steps: list[Step] = [
        {"kind": "prefill", "salt": f"{salt}w{rung}", "tokens": rung, "max_tokens": 1, "warmup": True} for rung in rungs
    ]
    for number in range(count):
        steps += [
            {"kind": "prefill", "salt": f"{salt}o{rung}.{number}", "tokens": rung, "max_tokens": 1, "least": least}
            for rung in rungs
        ]
    return [*steps, {**steps[-1], "planted": "repetition"}]


def hit(max_model_len: int, salt: str) -> list[Step]:
    """The longest prompt up to 1024 tokens, twice: the second must be refused."""
    step: Step = {"kind": "prefill", "salt": f"{salt}hit", "tokens": min(1024, max_model_len - 1), "max_tokens": 1}
    return [{**step, "warmup": True}, {**step, "planted": "repetition"}]


def decode(max_model_len: int, count: int, salt: str, tokens: int, least: int = LEAST) -> list[Step]:
    """Structured and prose, one warm-up each, then `count` answers of `tokens` (or what fits) each, one at a time."""
    length = min(tokens, max_model_len - WORDS_ROOM)
    steps: list[Step] = []
    for number in range(-1, count):
        for kind, words in WORDS.items():
            step: Step = {"kind": kind, "salt": f"{salt}{kind}{number}", "words": words, "max_tokens": length,
                          "least": least}  # fmt: skip
            steps.append({**step, "warmup": True} if number < 0 else step)
    return steps


def streams(
    max_model_len: int, max_num_seqs: int | None, salt: str, asked: Sequence[int], least: int = STREAM_RUNS
) -> list[Step]:
    """C1, C4, C8: that many greedy answers at once, `STREAM_RUNS` times; those that would only queue are left out."""
    length = min(STREAM_TOKENS, max_model_len - PROMPT_TOKENS)
    steps = []
    for many in asked:
        if max_num_seqs is None or many <= max_num_seqs:
            for number in range(-1, STREAM_RUNS):
                step: Step = {"kind": f"C{many}", "salt": f"{salt}C{many}.{number}", "tokens": PROMPT_TOKENS,
                              "max_tokens": length, "concurrency": many, "least": min(least, STREAM_RUNS)}  # fmt: skip
                steps.append({**step, "warmup": True} if number < 0 else step)
    return steps
