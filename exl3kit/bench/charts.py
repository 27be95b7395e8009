"""The plots of a report: every observation as a dot, so that a reader sees what a median hides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from exl3kit.bench.comparison import Rung
from exl3kit.bench.drawing import Dot, Drawing, Line, Words, spread

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 26, 34
ARMS: Mapping[str, tuple[str, bool]] = {"A": ("#1f5fa8", False), "B": ("#b4470f", True)}
GREY = "#8a8f98"


def strips(name: str, title: str, unit: str, groups: Sequence[tuple[str, str, Sequence[float]]]) -> Drawing:
    """One column of dots per group (label, arm, values), a bar at its median."""
    values = [value for _, _, group in groups for value in group]
    marks = ticks(0 if min(values) < max(values) / 2 else min(values), max(values))
    drawing = framed(name, title, unit, marks)
    for (label, arm, group), x in zip(groups, spread(len(groups), LEFT, WIDTH - RIGHT), strict=True):
        colour, hollow = ARMS.get(arm, ARMS["A"])
        middle = height(median(group), marks)
        drawing.shapes.append(Line(x - 11, middle, x + 11, middle, colour, 2))
        for number, value in enumerate(group):
            aside = (number - (len(group) - 1) / 2) * min(4.0, 20 / len(group))
            drawing.shapes.append(Dot(x + aside, height(value, marks), colour, hollow, title=f"{label}: {value:,.0f}"))
        drawing.shapes.append(Words(x, HEIGHT - BOTTOM + 15, label, "middle"))
    return drawing


def effects(name: str, title: str, rungs: Sequence[Rung]) -> Drawing:
    """B over A of each rung with its interval, beside the line of no effect."""
    ends = [value for rung in rungs for value in (rung.effect.low, rung.effect.high)]
    low, high = max(0.25, min([*ends, 0.99])), min(4.0, max([*ends, 1.01]))
    marks = ticks(low, high)
    drawing = framed(name, title, "B over A", marks)
    drawing.shapes.append(Line(LEFT, height(1, marks), WIDTH - RIGHT, height(1, marks), "#3d434b", 1.4))
    for rung, x in zip(rungs, spread(len(rungs), LEFT, WIDTH - RIGHT), strict=True):
        one, (colour, _) = rung.effect, ARMS["B"]
        bottom, top = (height(min(max(end, marks[0]), marks[-1]), marks) for end in (one.low, one.high))
        drawing.shapes.append(Line(x, bottom, x, top, colour, 2))
        about = f"{rung.name}: {one.ratio:.3f}, {one.low:.3f} to {one.high:.3f}"
        drawing.shapes.append(Dot(x, height(one.ratio, marks), colour, False, 4, about))
        drawing.shapes.append(Words(x, HEIGHT - BOTTOM + 15, rung.name, "middle"))
    return drawing


def divergences(name: str, title: str, positions: Sequence[Mapping[str, float]], limit: float) -> Drawing:
    """KLD of every position, control and other arm, on a logarithmic axis; what is below its foot lies on it."""
    foot = 1e-12
    series = {"A": [float(p["control"]) for p in positions if "control" in p],
              "B": [float(p["other"]) for p in positions if "other" in p]}  # fmt: skip
    largest = max([limit, *(value for values in series.values() for value in values)])
    top = math.ceil(math.log10(largest * 1.2))
    marks = [float(power) for power in range(-12, top + 1, max(1, math.ceil((top + 12) / 6)))]
    marks = marks if marks[-1] >= top else [*marks, marks[-1] + (marks[1] - marks[0])]
    drawing = framed(name, title, "nats", marks, [f"1e{mark:.0f}" for mark in marks])
    drawing.shapes.append(Line(LEFT, height(math.log10(limit), marks), WIDTH - RIGHT, height(math.log10(limit), marks),
                               "#3d434b", 1.4))  # fmt: skip
    for arm, values in series.items():
        colour, hollow = ARMS[arm]
        for value, x in zip(values, spread(max(1, len(values)), LEFT, WIDTH - RIGHT), strict=False):
            place = height(math.log10(max(value, foot)), marks)
            drawing.shapes.append(Dot(x, place, colour, hollow, 1.6, f"{arm}: {value:.2e}"))
    drawing.shapes.append(Words(LEFT, HEIGHT - BOTTOM + 15, "position in the text"))
    return drawing


def framed(name: str, title: str, unit: str, marks: Sequence[float], labels: Sequence[str] = ()) -> Drawing:
    """Title, unit and a horizontal line at every mark."""
    drawing = Drawing(name, title, WIDTH, HEIGHT)
    drawing.shapes.append(Words(4, 13, title, size=12, colour="#15181c"))
    drawing.shapes.append(Words(WIDTH - RIGHT, 13, unit, "end", 10, "#5d646e"))
    for mark, label in zip(marks, labels or [shown(mark) for mark in marks], strict=True):
        y = height(mark, marks)
        drawing.shapes += [Line(LEFT, y, WIDTH - RIGHT, y, "#d8dce1", 0.8), Words(LEFT - 5, y + 4, label, "end", 10)]
    return drawing


def height(value: float, marks: Sequence[float]) -> float:
    """Where a value lies on the page."""
    low, high = marks[0], marks[-1]
    return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round marks that hold both ends between them."""
    if not high > low:
        low, high = low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (power * factor) <= 6)
    first = math.floor(low / step)
    return [number * step for number in range(first, math.ceil(high / step - 1e-9) + 1)]


def shown(mark: float) -> str:
    return f"{mark:,.0f}" if abs(mark) >= 100 or mark == round(mark) else f"{mark:.3g}"
