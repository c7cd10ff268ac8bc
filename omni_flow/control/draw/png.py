"""A scene as PNG, drawn with Pillow at several times the size and scaled down, so that lines are smooth."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.draw.boxes import picture
from omni_flow.control.draw.scene import PAPER, Head, Point, Rect, Scene, Stroke, Text, scene

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_OUT = 2
_STEPS = 24
_MOST_PIXELS = 120_000_000
"""Above this many pixels while drawing, the picture is drawn at its final size: 360 MB are enough for a picture."""


class PillowMissing(ImportError):
    """Pillow is not installed."""

    def __init__(self) -> None:
        super().__init__("a PNG needs Pillow: pip install pillow; SVG and Mermaid need nothing")


def png(graph: CompiledGraph) -> bytes:
    """The graph as a PNG file of twice the size of its SVG. Raises `PillowMissing`."""
    return render(scene(picture(graph.spec)))


def render(made: Scene) -> bytes:
    """The marks of a scene as the bytes of a PNG file."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise PillowMissing from None
    width, height = int(made.width), int(made.height)
    over = 4 if width * height * 16 <= _MOST_PIXELS else _OUT
    image = Image.new("RGB", (width * over, height * over), PAPER)
    draw = ImageDraw.Draw(image)
    fonts: dict[float, Any] = {}
    for mark in made.marks:
        if isinstance(mark, Rect):
            _rect(draw, mark, over)
        elif isinstance(mark, Text):
            _text(draw, mark, fonts, over)
        elif isinstance(mark, Head):
            x, y = mark.x * over, mark.y * over
            draw.polygon([(x, y), (x - 9 * over, y - 4.5 * over), (x - 9 * over, y + 4.5 * over)], mark.colour)
        else:
            _stroke(draw, mark, over)
    out = io.BytesIO()
    image.resize((width * _OUT, height * _OUT), Image.Resampling.LANCZOS).save(out, "PNG", optimize=True)
    return out.getvalue()


def _rect(draw: ImageDraw, mark: Rect, over: int) -> None:
    box = (mark.x * over, mark.y * over, (mark.x + mark.width) * over, (mark.y + mark.height) * over)
    corners = (True, True, not mark.flat, not mark.flat)
    fill = None if mark.fill == "none" else mark.fill
    width = over if mark.line else 0
    radius = min(mark.radius, mark.width / 2, mark.height / 2) * over
    draw.rounded_rectangle(box, radius, fill, mark.line, width, corners=corners)


def _text(draw: ImageDraw, mark: Text, fonts: dict[float, Any], over: int) -> None:
    from PIL import ImageFont

    font = fonts.get(mark.size)
    if font is None:
        font = fonts[mark.size] = ImageFont.load_default(mark.size * over)
    anchor = {"start": "lm", "middle": "mm", "end": "rm"}[mark.anchor]
    stroke = 1 if mark.bold else 0
    draw.text((mark.x * over, mark.y * over), mark.text, mark.colour, font, anchor, stroke_width=stroke)


def _stroke(draw: ImageDraw, mark: Stroke, over: int) -> None:
    points = [(x * over, y * over) for x, y in _flatten(mark.points)]
    width = round(mark.width * over)
    if not mark.dashed:
        draw.line(points, mark.colour, width, "curve")
        return
    for piece in _dashes(points, 6 * over, 4 * over):
        draw.line(piece, mark.colour, width, "curve")


def _flatten(points: tuple[Point, ...]) -> list[Point]:
    """A cubic Bézier path as short straight pieces."""
    flat = [points[0]]
    for i in range(1, len(points), 3):
        a, (b, c, d) = flat[-1], points[i : i + 3]
        for step in range(1, _STEPS + 1):
            t = step / _STEPS
            u = 1 - t
            weights = (u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t)
            corners = (a, b, c, d)
            x = sum(w * p[0] for w, p in zip(weights, corners, strict=True))
            flat.append((x, sum(w * p[1] for w, p in zip(weights, corners, strict=True))))
    return flat


def _dashes(points: list[Point], on: float, off: float) -> list[list[Point]]:
    """The pieces of a polyline that a dashed pen draws."""
    pieces: list[list[Point]] = [[points[0]]]
    drawing, left = True, on
    for (ax, ay), (bx, by) in pairwise(points):
        length = ((bx - ax) ** 2 + (by - ay) ** 2) ** 0.5
        done = 0.0
        while length - done > left:
            done += left
            at = (ax + (bx - ax) * done / length, ay + (by - ay) * done / length)
            if drawing:
                pieces[-1].append(at)
            else:
                pieces.append([at])
            drawing = not drawing
            left = on if drawing else off
        left -= length - done
        if drawing:
            pieces[-1].append((bx, by))
    return [piece for piece in pieces if len(piece) > 1]
