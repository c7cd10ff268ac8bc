"""Strokes and texts of a picture, independent of the format they are written in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from omni_flow.control.draw.boxes import Box, Edge, Picture
from omni_flow.control.draw.layout import FOOT, HEAD, LABEL, Layout, Node, lay_out, text_width

MARGIN, TITLE = 28.0, 34.0
INK, GREY, LINE, PAPER = "#1f2933", "#66727f", "#7b8794", "#ffffff"
_HEADS = ("#cfe3f7", "#fde2c4", "#d5edd3", "#ead7f2", "#fbd5d5", "#d0eceb", "#f4e6a9", "#dfe0f5")
_PLACEHOLDER, _OUTPUT = ("#eef1f4", "#9aa5b1"), ("#e3f4e6", "#6aa877")
_BACK = "#b8613a"
_LANE, _TURN = 22.0, 26.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle with rounded corners; `flat` ones are square at the bottom."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str | None = None
    radius: float = 8.0
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; (x, y) is the middle of its left end, its centre or its right end."""

    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = INK
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line through `points`: first point, then triples of two control points and an end (cubic Bézier)."""

    points: tuple[Point, ...]
    colour: str = LINE
    width: float = 1.4
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """An arrow head that points right, with its tip at (x, y)."""

    x: float
    y: float
    colour: str = LINE


@dataclass(slots=True)
class Scene:
    """All marks, in drawing order."""

    width: float
    height: float
    marks: list[Rect | Text | Stroke | Head] = field(default_factory=list)


def scene(picture: Picture) -> Scene:
    """Lay a picture out and say what to draw."""
    backs = [edge for edge in picture.edges if edge.back]
    layout = lay_out(picture, MARGIN + (_TURN if backs else 0), MARGIN + TITLE)
    width = max(layout.right + (_TURN if backs else 0), MARGIN + text_width(picture.name, 16) * 1.1)
    made = Scene(width + MARGIN, layout.bottom + _LANE * len(backs) + MARGIN)
    made.marks.append(Text(MARGIN, MARGIN + 6, picture.name, 16, INK, bold=True))
    labels: list[Rect | Text] = []
    ends = Counter((edge.target, edge.into) for edge in layout.ways)
    for edge, way in layout.ways.items():
        _edge(made, labels, layout, edge, way, ends[edge.target, edge.into] > 1)
    for index, edge in enumerate(backs):
        floor = layout.bottom + _LANE * (index + 0.75)
        _back_edge(made, labels, layout.nodes[edge.source], layout.nodes[edge.target], edge, floor)
    for node in layout.nodes.values():
        if node.box is not None:
            _box(made, node, node.box)
    made.marks += labels
    return made


def _edge(made: Scene, labels: list[Rect | Text], layout: Layout, edge: Edge, way: list[Node], shared: bool) -> None:
    """One edge. Its label stands at its end, or early on the last curve where several edges share the end."""
    source, target = way[0], way[-1]
    points: list[Point] = [(source.x + source.width, source.y + source.outs[edge.out])]
    # Inside its own column an edge runs straight, so that it can't touch a wider box above or below.
    _straight(points, layout.columns[source.layer][1])
    for node in way[1:-1]:
        _curve(points, node.x, node.y + node.height / 2)
        _straight(points, node.x + node.width)
    before = points[-1]
    entry, end = layout.columns[target.layer][0] - 8, (target.x - 1, target.y + target.ins[edge.into])
    _curve(points, entry, end[1])
    _straight(points, end[0] - 6)
    made.marks.append(Stroke(tuple(points), width=2.2 if edge.stream else 1.4))
    made.marks.append(Head(*end))
    width = text_width(edge.label, LABEL) + 8
    if edge.label and shared:
        x, y = before[0] + 0.34 * (entry - before[0]), before[1] + 0.22 * (end[1] - before[1])
        _label(labels, x + width / 2, y, edge.label)
    elif edge.label:
        _label(labels, entry - 4, end[1], edge.label)


def _straight(points: list[Point], x: float) -> None:
    px, py = points[-1]
    if x > px:
        points += [(px + (x - px) / 3, py), (px + 2 * (x - px) / 3, py), (x, py)]


def _curve(points: list[Point], x: float, y: float) -> None:
    px, py = points[-1]
    bend = (x - px) * 0.5
    points += [(px + bend, py), (x - bend, y), (x, y)]


def _label(labels: list[Rect | Text], x: float, y: float, text: str, colour: str = GREY) -> None:
    """A text on paper, ending at x."""
    width = text_width(text, LABEL) + 8
    labels.append(Rect(x - width, y - 8, width, 16, PAPER, None, 4))
    labels.append(Text(x - width / 2, y, text, LABEL, colour, "middle"))


def _back_edge(made: Scene, labels: list[Rect | Text], source: Node, target: Node, edge: Edge, floor: float) -> None:
    """Out to the right, down below everything, back to the left and in."""
    a = (source.x + source.width, source.y + source.outs[edge.out])
    b = (target.x - 1, target.y + target.ins[edge.into])
    right, left = a[0] + _TURN - 4, b[0] - _TURN
    corners = [a, (right, a[1]), (right, floor), (left, floor), (left, b[1]), (b[0] - 6, b[1])]
    made.marks.append(Stroke(_rounded(corners, 10.0), _BACK, 1.6, dashed=True))
    made.marks.append(Head(*b, _BACK))
    text = f"feedback {edge.label}".strip()
    _label(labels, (left + right + text_width(text, LABEL) + 8) / 2, floor, text, _BACK)


def _rounded(corners: list[Point], radius: float) -> tuple[Point, ...]:
    points = [corners[0]]
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        enter, leave = _towards(corner, before, radius), _towards(corner, after, radius)
        points += [*_line(points[-1], enter), _mid(enter, corner), _mid(leave, corner), leave]
    return tuple(points + list(_line(points[-1], corners[-1])))


def _towards(a: Point, b: Point, distance: float) -> Point:
    length = max(abs(b[0] - a[0]) + abs(b[1] - a[1]), 1e-9)
    share = min(distance, length / 2) / length
    return (a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share)


def _mid(a: Point, b: Point) -> Point:
    return (a[0] + (b[0] - a[0]) * 0.55, a[1] + (b[1] - a[1]) * 0.55)


def _line(a: Point, b: Point) -> tuple[Point, Point, Point]:
    return (
        (a[0] + (b[0] - a[0]) / 3, a[1] + (b[1] - a[1]) / 3),
        (a[0] + 2 * (b[0] - a[0]) / 3, a[1] + 2 * (b[1] - a[1]) / 3),
        b,
    )


def _box(made: Scene, node: Node, box: Box) -> None:
    x, y, w, h = node.x, node.y, node.width, node.height
    if box.kind != "interface":
        fill, line = _PLACEHOLDER if box.kind == "placeholder" else _OUTPUT
        made.marks.append(Rect(x, y, w, h, fill, line, h / 2))
        lift = 7 if box.subtitle else 0
        made.marks.append(Text(x + w / 2, y + h / 2 - lift, box.title, 13, INK, "middle", True))
        made.marks.append(Text(x + w / 2, y + h / 2 + 9, box.subtitle, 10.5, GREY, "middle"))
        return
    colour = _HEADS[box.colour % len(_HEADS)]
    made.marks.append(Rect(x, y, w, h, PAPER, None))
    made.marks.append(Rect(x, y, w, HEAD - 4, colour, None, flat=True))
    made.marks.append(Rect(x, y, w, h, "none", LINE))
    lift = 8 if box.subtitle else 0
    made.marks.append(Text(x + w / 2, y + (HEAD - 4) / 2 - lift, box.title, 13, INK, "middle", True))
    made.marks.append(Text(x + w / 2, y + (HEAD - 4) / 2 + 9, box.subtitle, 10.5, GREY, "middle"))
    made.marks += [Text(x + 12, y + at, port) for port, at in node.ins.items()]
    made.marks += [Text(x + w - 12, y + at, port, anchor="end") for port, at in node.outs.items()]
    if box.note:
        made.marks.append(Text(x + w / 2, y + h - FOOT / 2 - 2, box.note, 10.5, GREY, "middle"))
