"""A compiled graph as a picture: `mermaid(graph)`, `svg(graph)`, `png(graph)`.

`boxes.py` says what is drawn, `layout.py` where (a small layered layout; no graphviz), `scene.py` turns both into
strokes and texts, `svg.py` and `png.py` write those. PNG needs Pillow.
"""

from omni_flow.control.draw.mermaid import mermaid
from omni_flow.control.draw.png import png
from omni_flow.control.draw.svg import svg

__all__ = ["mermaid", "png", "svg"]
