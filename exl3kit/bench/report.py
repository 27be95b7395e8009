"""`kit bench report`: one page of a campaign, drawn from its observations anew, and its plots as PNGs.

The page is one file without scripts or anything from elsewhere: it can be mailed, archived and read in ten years.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from exl3kit.bench import ab, charts, differences, summaries
from exl3kit.bench.comparison import Comparison
from exl3kit.bench.drawing import Drawing
from exl3kit.bench.records import Campaign
from exl3kit.bench.summaries import Judged, Row

TEMPLATE = Path(__file__).with_name("report.html.j2")
PAGE = "report.html"
HEADS = ("#", "boot", "kind", "prompt", "cached", "computed", "TTFT ms", "client ms", "tokens/s", "load", "free GB",
         "verdict")  # fmt: skip
UNIT = "tokens/s"


@dataclass
class View:
    """What the page shows."""

    title: str
    verdict: str
    valid: bool
    lines: list[str]
    tables: list[dict[str, Any]] = field(default_factory=list)
    charts: list[Drawing] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)


def write(campaign: Campaign, out: Path, earlier: Campaign | None = None) -> tuple[View, list[Path]]:
    """Write `report.html` and one PNG per plot into `out`; gives what the page says and the files, the page first."""
    from jinja2 import Environment, StrictUndefined

    view, pairs = look(campaign), summaries.judged(campaign.observations)
    if earlier is not None:
        view.tables += days_apart(campaign, earlier)
    out.mkdir(parents=True, exist_ok=True)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = out / PAGE
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        **view.__dict__, campaign=campaign, when=day(campaign), gate=gate_table(pairs) if pairs else None,
        stamp=campaign.head.get("stamp") or campaign.head.get("a", {}).get("stamp"), target=campaign.head.get("target"),
    )  # fmt: skip
    page.write_text(text + "\n", encoding="utf-8")
    pictures = [out / f"{chart.name}.png" for chart in view.charts]
    for chart, path in zip(view.charts, pictures, strict=True):
        chart.save_png(path)
    return view, [page, *pictures]


def day(campaign: Campaign) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(float(campaign.head["at"])))


def look(campaign: Campaign) -> View:
    """The view of a campaign by its verb."""
    views = {"ab": of_ab, "parity": of_parity, "load": of_load, "mnbt": of_mnbt}
    view = views.get(campaign.verb, of_rungs)(campaign)
    view.details += [
        {"title": f"Environment of boot {boot['number']} ({boot['arm']})", "rows": flat(boot["environment"])}
        for boot in campaign.boots
    ]
    measured = {**what_was_measured(campaign), "facts": campaign.head.get("facts", {})}
    view.details.append({"title": "Recipe and server", "rows": flat(measured)})
    return view


def of_rungs(campaign: Campaign) -> View:
    """Prefill, decode and what else is rows of rates of one boot."""
    pairs = summaries.judged(campaign.observations)
    found = summaries.faults(pairs, max_cv=float(campaign.head.get("max_cv", 0.15)))
    view = View(title_of(campaign), "invalid" if found else "valid", not found, found)
    view.tables.append(table_of(summaries.rows(pairs)))
    rates = summaries.rates_by_rung(pairs)
    for name, title, wanted in (
        ("prefill", "Cold prefill by prompt length", lambda rung: rung.isdecimal()),
        ("decode", "Decode", lambda rung: not rung.isdecimal()),
    ):
        groups = [(rung, "A", values) for rung, values in rates.items() if wanted(rung)]
        if groups:
            view.charts.append(charts.strips(name, title, UNIT, groups))
    return view


def title_of(campaign: Campaign) -> str:
    recipe = campaign.head.get("recipe") or campaign.head.get("a", {}).get("recipe") or {}
    return f"kit bench {campaign.verb}: {recipe.get('name') or campaign.head.get('facts', {}).get('model', 'a server')}"


def table_of(rows: Sequence[Row]) -> dict[str, Any]:
    heads = ("", "n", "tokens/s", "slowest", "fastest", "CV", "TTFT ms", "client ms", "acceptance")
    cells = [
        (row.name, row.count, *(f"{rate:,.0f}" for rate in (row.rate, row.low, row.high)), f"{row.cv:.1%}",
         f"{row.ttft * 1e3:,.1f}", f"{row.overhead * 1e3:.2f}", f"{row.acceptance:.2f}" if row.acceptance else "-")
        for row in rows
    ]  # fmt: skip
    return {"title": "Medians", "note": "", "heads": heads, "rows": cells}


def of_ab(campaign: Campaign) -> View:
    """An A-B-A campaign: its one claim, the rungs, and every boot."""
    found = ab.read_again(campaign)
    view = View(title_of(campaign), found.verdict, found.verdict != "invalid", [found.why, *found.faults[1:]])
    view.lines += [claim(found)] if found.effect else []
    named = [(name, "named") for name in campaign.head.get("named", [])] or [("nothing", "A against A")]
    view.tables.append({"title": "What the arms differ in", "note": "Everything else was equal in every boot.",
                        "heads": ("", ""), "rows": named})  # fmt: skip
    view.tables.append({
        "title": "Rungs", "note": "Described, not claimed: the campaign's one claim is about all rungs together.",
        "heads": ("", "A", "B", "B/A", "from", "to", "CV A", "CV B", "all apart", "drift of A"),
        "rows": [
            (rung.name, f"{rung.a:,.0f}", f"{rung.b:,.0f}", f"{rung.effect.ratio:.3f}", f"{rung.effect.low:.3f}",
             f"{rung.effect.high:.3f}", f"{rung.cv_a:.1%}", f"{rung.cv_b:.1%}", "yes" if rung.separated else "no",
             f"{rung.effect.drift - 1:+.1%}")
            for rung in found.rungs
        ],
    })  # fmt: skip
    by_boot = [(boot, summaries.rates_by_rung(summaries.judged(campaign.of_boot(boot["number"])))) for boot in
               campaign.boots]  # fmt: skip
    for rung in dict.fromkeys(name for _, rates in by_boot for name in rates):
        groups = [
            (f"{boot['number']} {boot['arm']}", boot["arm"], rates[rung]) for boot, rates in by_boot if rung in rates
        ]
        view.charts.append(charts.strips(f"boots-{rung}", f"Prompts of {rung} tokens, by boot", UNIT, groups))
    if found.rungs:
        view.charts.append(charts.effects("effect", "Effect by prompt length", found.rungs))
    return view


def claim(found: Comparison) -> str:
    assert found.effect is not None
    one = found.effect
    return (
        f"B/A over all rungs {one.ratio:.3f}, {1 - one.level:.0%} interval {one.low:.3f} to {one.high:.3f}; "
        f"{one.boots[0]} boots of A and {one.boots[1]} of B, the boot being the unit; A drifted by {one.drift - 1:+.1%}"
    )


def of_parity(campaign: Campaign) -> View:
    """Control and other arm beside each other."""
    result = campaign.result
    view = View(title_of(campaign), result["verdict"], bool(result["valid"]), list(result["sentences"]))
    view.tables.append({
        "title": "Divergence", "note": "Each position has the same text before it; A again is the control.",
        "heads": ("", "positions", "mean KLD", "largest", "top-1 alike", "log-likelihood A", "of the other"),
        "rows": [
            (f"{name}, {one['kind']}", one["positions"], f"{one['mean']:.3e}", f"{one['largest']:.3e}",
             f"{one['agreement']:.2%}", *(f"{value:.6f}" for value in one["likelihood"] or ()))
            for name, side in (("A again", result["control"]), ("B", result["other"])) for one in side
        ],
    })  # fmt: skip
    for kind in ("prefill", "decode"):
        positions = [one for one in campaign.positions if one["kind"] == kind]
        if positions:
            title = f"KLD by position, {kind}"
            view.charts.append(charts.divergences(f"kld-{kind}", title, positions, float(result["limit"])))
    return view


def of_load(campaign: Campaign) -> View:
    """Throughput and latency by requests at once."""
    from exl3kit.bench import load

    found = [f"{row['level']} at once: {fault}" for row in campaign.levels for fault in load.faults_of(row)]
    view = View(title_of(campaign), "invalid" if found else "valid", not found, found)
    note = f"vllm bench serve: prompts of {campaign.head['prompt']} tokens, answers of {campaign.head['answer']}."
    view.tables.append({"title": "Load", "note": note, "heads": load.HEADS,
                        "rows": [load.cells(row) for row in campaign.levels]})  # fmt: skip
    groups = [(f"{row['level']}", "A", [float(row["told"]["output_throughput"])]) for row in campaign.levels]
    view.charts += [charts.strips("load", "Generated tokens by requests at once", UNIT, groups)] if groups else []
    return view


def of_mnbt(campaign: Campaign) -> View:
    """Throughput of the longest prompt by value, and what was recommended."""
    result = campaign.result
    lines = [f"recommended: {result['why']}"] if result.get("why") else list(result.get("faults", []))
    view = View(title_of(campaign), "valid" if result.get("valid") else "invalid", bool(result.get("valid")), lines)
    heads = ("MNBT", "tokens/s", "TTFT short ms", "beside long ms", "KV tokens")
    rows = [
        (f"{one['value']:,}", f"{one['rate']:,.0f}", f"{one['short'] * 1e3:,.1f}",
         f"{one['beside'] * 1e3:,.1f}" if one["beside"] is not None else "-", f"{one['pool'] or 0:,}")
        for one in result.get("settings", [])
    ]  # fmt: skip
    view.tables.append({"title": "Values", "note": "Each value is a boot of its own.", "heads": heads, "rows": rows})
    groups = []
    for boot in campaign.boots:
        rates = summaries.rates_by_rung(summaries.judged(campaign.of_boot(boot["number"])))
        if rates:
            groups.append((f"{boot['value']:,}", "A", rates[max(rates, key=int)]))
    view.charts += (
        [charts.strips("mnbt", "Cold prefill of the longest prompt, by MNBT", UNIT, groups)] if groups else []
    )
    return view


def gate_table(pairs: Sequence[Judged]) -> dict[str, Any]:
    """Every observation with what the gate says of it."""
    samples = [verdict for one, verdict in pairs if summaries.is_sample(one)]
    planted = [verdict for one, verdict in pairs if one["step"].get("planted")]
    return {
        "samples": len(samples),
        "counted": sum(verdict.counts for verdict in samples),
        "warmups": sum(bool(one["step"].get("warmup")) for one, _ in pairs),
        "planted": len(planted),
        "planted_refused": sum(not verdict.counts for verdict in planted),
        "heads": HEADS,
        "rows": [gate_row(number, one, verdict) for number, (one, verdict) in enumerate(pairs)],
    }


def gate_row(number: int, one: Mapping[str, Any], verdict: Any) -> dict[str, Any]:
    usage = [request.get("usage") or {} for request in one["requests"]]
    cached = sum((use.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for use in usage)
    rate, machine, kind = summaries.rate_of(one, verdict), one.get("machine", {}), one["step"]["kind"]
    role = "planted " if one["step"].get("planted") else "warm-up " if one["step"].get("warmup") else ""
    memory = f"{machine.get('mem_available', 0) / 1e9:.1f}"
    cells = (
        number, one.get("boot", 0), f"{role}{kind}", sum(use.get("prompt_tokens", 0) for use in usage), cached,
        verdict.computed, f"{verdict.ttft * 1e3:.1f}" if verdict.ttft else "-", f"{one['round_trip'] * 1e3:.2f}",
        f"{rate:,.0f}" if rate else "-", f"{machine.get('load', 0):.1f}", memory,
    )  # fmt: skip
    said = "counts" if verdict.counts else "; ".join(verdict.reasons)
    return {"cells": cells, "verdict": said, "counts": verdict.counts, "sample": summaries.is_sample(one)}


def days_apart(campaign: Campaign, earlier: Campaign) -> list[dict[str, Any]]:
    """Two campaigns of different days side by side. Not a comparison of arms: what else changed in between nobody
    knows, so no effect is claimed."""
    now, then = (summaries.rates_by_rung(summaries.judged(one.observations)) for one in (campaign, earlier))
    rows = []
    for rung in (rung for rung in now if rung in then):
        before, after = median(then[rung]), median(now[rung])
        rows.append((rung, f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.3f}"))
    first = [one.boots[0]["environment"] if one.boots else {} for one in (earlier, campaign)]
    heads = [what_was_measured(one) for one in (earlier, campaign)]
    changed = {**differences.between(*heads), **differences.between(*first)}
    lines = [line.partition(": ")[::2] for line in differences.told(changed)] or [("nothing that is recorded", "")]
    note = f"{day(earlier)} against {day(campaign)}; days apart prove no effect, only boots in turn do."
    return [
        {"title": "Beside an earlier day", "note": note, "heads": ("", "earlier", "now", "now/earlier"), "rows": rows},
        {"title": "What changed in between", "note": "", "heads": ("", "earlier → now"), "rows": lines},
    ]


def what_was_measured(campaign: Campaign) -> dict[str, Any]:
    """Recipes, stamps and kit of a campaign; of a lock the stamp says whether it is the same."""
    head = {key: value for key, value in campaign.head.items() if key in ("recipe", "stamp", "kit")}
    arms = {arm: campaign.head[arm] for arm in ("a", "b") if arm in campaign.head}
    return head | {arm: {key: told[key] for key in told if key != "lock"} for arm, told in arms.items()}


def flat(value: Any) -> list[tuple[str, Any]]:
    """Leaves of a record with their paths."""
    return [(path, pair[0]) for path, pair in differences.between(value, {}).items() if pair[0] is not None]
