"""A scene as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.draw.boxes import picture
from omni_flow.control.draw.scene import PAPER, Head, Rect, Scene, Stroke, Text, scene

_FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


def svg(graph: CompiledGraph) -> str:
    """The graph as an SVG document, self-contained."""
    return render(scene(picture(graph.spec)))


def render(made: Scene) -> str:
    """The marks of a scene as an SVG document."""
    size = f'width="{made.width:.0f}" height="{made.height:.0f}" viewBox="0 0 {made.width:.0f} {made.height:.0f}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family={quoteattr(_FONT)}>']
    lines.append(f'<rect width="100%" height="100%" fill="{PAPER}"/>')
    lines += [_mark(mark) for mark in made.marks]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _mark(mark: Rect | Text | Stroke | Head) -> str:
    if isinstance(mark, Rect):
        return _rect(mark)
    if isinstance(mark, Text):
        weight = ' font-weight="600"' if mark.bold else ""
        return (
            f'<text x="{mark.x:.1f}" y="{mark.y:.1f}" dy="0.35em" font-size="{mark.size}" fill="{mark.colour}" '
            f'text-anchor="{mark.anchor}"{weight}>{escape(mark.text)}</text>'
        )
    if isinstance(mark, Head):
        x, y = mark.x, mark.y
        return f'<path d="M{x:.1f} {y:.1f}l-9 -4.5v9z" fill="{mark.colour}"/>'
    first, *rest = mark.points
    path = f"M{first[0]:.1f} {first[1]:.1f}"
    for i in range(0, len(rest), 3):
        path += "C" + " ".join(f"{x:.1f} {y:.1f}" for x, y in rest[i : i + 3])
    dash = ' stroke-dasharray="6 4"' if mark.dashed else ""
    return f'<path d="{path}" fill="none" stroke="{mark.colour}" stroke-width="{mark.width}"{dash}/>'


def _rect(mark: Rect) -> str:
    line = f' stroke="{mark.line}" stroke-width="1.2"' if mark.line else ""
    x, y, w, h, r = mark.x, mark.y, mark.width, mark.height, mark.radius
    if mark.flat:
        path = f"M{x:.1f} {y + h:.1f}V{y + r:.1f}q0 -{r} {r} -{r}H{x + w - r:.1f}q{r} 0 {r} {r}V{y + h:.1f}z"
        return f'<path d="{path}" fill="{mark.fill}"{line}/>'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{r:.1f}" fill="{mark.fill}"{line}/>'
