"""From facts to the words on the page; the templates only put them in their places.

No lines of logs, no arguments and no environment come in, so no key and no prompt; sentences pass through `safe`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from exl3kit import __version__, post_mortem, receipts, status_words
from exl3kit.deploy_lock import age
from exl3kit.faults import printable
from exl3kit.redaction import Redactor

if TYPE_CHECKING:
    from exl3kit.dash.gather import Facts
    from exl3kit.errors import KitError

FOLDER = Path(__file__).parent
GOOD, SOON, BAD = "good", "soon", "bad"  # classes of the style sheet; the words beside them say the same
TONES = {"serving": GOOD, "starting": SOON, "waiting": SOON, "stopping": SOON, "stopped": SOON}
RECEIPT = (
    "configured_tier", "effective_tier", "tier_reason", "backend", "kernel_targets", "layers", "trellis_tensors",
    "trellis_bytes", "rates", "codebooks", "shared_suh", "moe_layers_loaded", "rows_expected", "rows_handled",
    "fallback_reasons", "arena_bytes", "fingerprint", "stamp", "demo",
)  # fmt: skip
OLD = 6.0  # seconds after which the page says how old is what it shows of a node; usual are two
GRAPH = (300, 40)  # units of its view box

_environment = Environment(
    loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def page(facts: Facts) -> str:
    """The whole page; it says everything without a script too, once."""
    nodes = ", ".join(facts.nodes)
    return _environment.get_template("page.html.j2").render(
        nodes=nodes, version=__version__, news=news(facts), main=main(facts)
    )


def main(facts: Facts) -> str:
    """What is inside the page's `<main>`, which is all that changes."""
    return _environment.get_template("main.html.j2").render(
        time=time.strftime("%H:%M:%S", time.localtime(facts.at)),
        asked=facts.asked,
        fault=facts.fault and safe(facts.fault),
        named=facts.named,
        wanted=facts.deployment,
        any_answers=len(facts.unreachable) < len(facts.nodes),
        deployments=[deployment(one) for one in facts.deployments],
        nodes=[] if facts.asked or facts.fault else [node(name, facts) for name in facts.nodes],
        death=death(facts.death) if facts.death else None,
        bench=facts.bench,
    )


def news(facts: Facts) -> str:
    """One sentence for those who hear the page: the states, and nothing that changes with every look."""
    if facts.fault:
        return "The kit itself failed."
    if facts.asked:
        return f"Asking {', '.join(facts.asked)}."
    said = [f"{one['deployment']}: {one['state']}." for one in facts.deployments]
    said += [f"Node {name} does not answer." for name in facts.unreachable]
    return " ".join(said) or "No deployment stands."


def safe(text: str) -> str:
    """A sentence that came from a program or another machine: on one line, what looks like a secret masked."""
    return printable(Redactor().text(text))


# ---- deployments -----------------------------------------------------------------------------------------------------


def deployment(one: Mapping[str, Any]) -> dict[str, Any]:
    """One deployment with its ranks; `figures` are pairs of words."""
    found = held(one)
    speed = one["speed"]
    rate = speed["tokens_per_s"]
    return {
        "id": slug(one["deployment"]),
        "name": one["deployment"],
        "state": one["state"],
        "tone": TONES.get(one["state"], BAD),
        "note": one["note"] and safe(one["note"]),
        "figures": [
            ("tokens/s", "-" if rate is None else f"{rate:,.1f}"),
            ("TTFT, last minute", ttft(speed["ttft"])),
            ("TTFT, since start", ttft(speed["ttft_since_start"])),
            ("tier", tier(found)),
            ("model", one["model"]),
            ("API port", str(one["port"])),
            ("image", one["stamp"][:12]),
            ("generation", one["generation"]),
            ("incarnation", str(one["incarnation"] or "-")),
        ],
        "graph": graph(speed["history"], speed["history_s"]),
        "ranks": [rank(told) for told in one["ranks"]],
        "receipts": agreement(found),
        "death": next((death(told) for told in [newest_death(one)] if told), None),
    }


def ttft(told: tuple[float, int] | None) -> str:
    """`312 ms over 4 requests`."""
    if told is None:
        return "-"
    seconds, count = told
    return f"{seconds * 1e3:,.0f} ms over {count:,} request{'' if count == 1 else 's'}"


def held(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The receipts of all ranks, each with its node."""
    return [{**receipt, "node": told["node"]} for told in one["ranks"] for receipt in told["receipts"]]


def tier(found: Sequence[Mapping[str, Any]]) -> str:
    return " / ".join(sorted({str(receipt.get("effective_tier")) for receipt in found})) or "-"


def agreement(found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Whether the receipts of the ranks say the same; None when there are none."""
    if not found:
        return None
    differ = receipts.disagreements(found)
    what = f"{len(found)} receipt{'' if len(found) == 1 else 's'}"
    return {"agree": not differ, "says": f"{what}: {'the ranks agree' if not differ else 'the ranks disagree'}",
            "faults": differ}  # fmt: skip


def rank(told: dict[str, Any]) -> dict[str, Any]:
    """One rank: figures for the eye, `kv` for a meter (0 to 1 or None), its receipt in full."""
    progress = told["progress"] or {}
    figures = [
        ("in this state for", status_words.since(told)),
        ("requests", status_words.requests(told)),
        ("KV cache", status_words.kv(told)),
        ("memory", status_words.memory(told)),
        ("network", (told["transport"] or {}).get("says") or "-"),
        ("receipt", status_words.receipts(told)),
    ]
    return {
        "number": told["rank"],
        "node": told["node"],
        "state": told["state"],
        "tone": TONES.get(told["state"], BAD),
        "figures": [(name, value) for name, value in figures if value != "-"],
        "kv": progress.get("kv_usage"),
        "remark": safe(status_words.remark(told)),
        "receipt": [
            (key.replace("_", " "), plain(receipt[key])) for receipt in told["receipts"] for key in RECEIPT
            if receipt.get(key) is not None
        ],
    }  # fmt: skip


def plain(value: Any) -> str:
    """A figure of a receipt: digests short, objects as `name: count`."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text


def graph(history: Sequence[float], seconds: float) -> dict[str, Any] | None:
    """Tokens per second as the points of a line; None of fewer than two looks."""
    if len(history) < 2:
        return None
    width, height = GRAPH
    top, step = max(*history, 1.0), width / (len(history) - 1)
    heights = (height - 1 - value / top * (height - 2) for value in history)
    points = " ".join(f"{number * step:.1f},{y:.1f}" for number, y in enumerate(heights))
    says = f"tokens/s, last {age(round(seconds))}: {min(history):,.1f} to {max(history):,.1f}"
    return {"points": points, "says": says, "width": width, "height": height}


def slug(name: str) -> str:
    """A deployment's name as the id of an element."""
    return "deployment-" + re.sub(r"[^A-Za-z0-9_-]", "-", name)


# ---- post-mortems ----------------------------------------------------------------------------------------------------


def newest_death(one: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return post_mortem.choose(told["post_mortem"] for told in one["ranks"] if told["post_mortem"])


def death(told: Mapping[str, Any]) -> dict[str, Any]:
    """When, who was first and why, and what each rank said of its own end; last lines of logs stay out."""
    first, records = told["first"], sorted(told["records"].items(), key=lambda one: int(one[0]))
    who = f"rank {first['rank']}, {first.get('process') or 'its supervisor'}"
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["written"])),
        "first": safe(f"{who}: {first['sentence']}"),
        "records": [record(number, said) for number, said in records]
        + [f"rank {number}: said nothing more" for number in told["missing"]],
    }


def record(number: str, said: Mapping[str, Any]) -> str:
    code = said.get("exit_code")
    how = said.get("signal") or (None if code is None else f"exit code {code}")
    return safe(f"rank {number}: {said['sentence']}" + (f" ({how})" if how else ""))


# ---- nodes -----------------------------------------------------------------------------------------------------------


def node(name: str, facts: Facts) -> dict[str, Any]:
    """One node: whether it answers, and if not why, and what to do."""
    error = facts.unreachable.get(name)
    ranks = [(one, told) for one in facts.deployments for told in one["ranks"] if told["node"] == name]
    memory = next((said for _, told in ranks if (said := status_words.memory(told)) != "-"), "-")
    holds = ", ".join(f"rank {told['rank']} of {one['deployment']}" for one, told in ranks) or "no rank"
    seconds = facts.ages.get(name, 0.0)
    old = f"{age(round(seconds))} ago" if seconds >= OLD else "-"
    figures = [("holds", holds), ("memory", memory), ("address", facts.addresses.get(name) or "-"), ("told", old)]
    return {
        "name": name,
        "state": "unreachable" if error else "answers",
        "tone": BAD if error else GOOD,
        "figures": [(what, value) for what, value in figures if value != "-"],
        "why": failure(error) if error else None,
        "next": error.next_step and safe(error.next_step) if error else None,
    }


def failure(error: KitError) -> str:
    return safe(error.what + (f" ({error.why})" if error.why else ""))
