"""Lines, dots and words, as SVG for a page and as PNG for everything else. What they mean is `charts`' business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

PNG_SCALE = 3  # pixels per unit: sharp on paper and on dense screens


@dataclass(frozen=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str = "#8a8f98"
    width: float = 1.0


@dataclass(frozen=True)
class Dot:
    """`hollow` tells two series apart without their colours; `title` is what a pointer shows."""

    x: float
    y: float
    colour: str
    hollow: bool = False
    radius: float = 3.2
    title: str = ""


@dataclass(frozen=True)
class Words:
    """`anchor` is start, middle or end of the text at x; y is its base line."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    size: int = 11
    colour: str = "#3d434b"


Shape = Line | Dot | Words


@dataclass
class Drawing:
    """A picture in units that are pixels on a phone."""

    name: str
    title: str
    width: int
    height: int
    shapes: list[Shape] = field(default_factory=list)

    def svg(self) -> str:
        """An `<svg>` element that takes the width it is given."""
        inside = "".join(_element(shape) for shape in self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}" data-chart="{escape(self.name)}">{inside}</svg>'
        )

    def save_png(self, path: Path) -> None:
        """The same as a PNG on white."""
        from PIL import Image, ImageDraw, ImageFont

        image = Image.new("RGB", (self.width * PNG_SCALE, self.height * PNG_SCALE), "white")
        pen = ImageDraw.Draw(image)
        for shape in self.shapes:
            if isinstance(shape, Line):
                ends = (shape.x1, shape.y1, shape.x2, shape.y2)
                pen.line([end * PNG_SCALE for end in ends], fill=shape.colour, width=round(shape.width * PNG_SCALE))
            elif isinstance(shape, Dot):
                box = [shape.x - shape.radius, shape.y - shape.radius, shape.x + shape.radius, shape.y + shape.radius]
                fill = "white" if shape.hollow else shape.colour
                pen.ellipse([side * PNG_SCALE for side in box], fill=fill, outline=shape.colour, width=PNG_SCALE)
            else:
                font = ImageFont.load_default(shape.size * PNG_SCALE)
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                place = (shape.x * PNG_SCALE, shape.y * PNG_SCALE)
                pen.text(place, shape.text, fill=shape.colour, font=font, anchor=anchor)
        image.save(path)


def _element(shape: Shape) -> str:
    if isinstance(shape, Line):
        ends = f'x1="{shape.x1:.1f}" y1="{shape.y1:.1f}" x2="{shape.x2:.1f}" y2="{shape.y2:.1f}"'
        return f'<line {ends} stroke="{shape.colour}" stroke-width="{shape.width:g}"/>'
    if isinstance(shape, Dot):
        fill = "var(--paper, #fff)" if shape.hollow else shape.colour
        about = f"<title>{escape(shape.title)}</title>" if shape.title else ""
        place = f'cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}"'
        return f'<circle {place} fill="{fill}" stroke="{shape.colour}" stroke-width="1.2">{about}</circle>'
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" text-anchor="{shape.anchor}"'
    return f'<text {place} fill="{shape.colour}">{escape(shape.text)}</text>'


def spread(count: int, low: float, high: float) -> Sequence[float]:
    """`count` places between two, with half a step of room at either end."""
    return [low + (high - low) * (number + 0.5) / count for number in range(count)]
