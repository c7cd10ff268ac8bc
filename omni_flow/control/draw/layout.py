"""A small layered layout, left to right: layers by longest path, order by barycentres, heights by least squares.

Sugiyama, Tagawa, Toda: "Methods for visual understanding of hierarchical system structures" (1981) without cycle
removal (back edges are known) and with pooled adjacent violators for the heights.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from omni_flow.control.draw.boxes import Box, Edge, Picture

ROW, HEAD, FOOT, PAD = 22.0, 44.0, 20.0, 10.0
PILL = 42.0
LABEL = 10.5
COLUMN_GAP, BOX_GAP, LANE_GAP = 96.0, 26.0, 20.0
_SWEEPS = 12
"""Rounds of ordering, and half the rounds of placing: more changes nothing on graphs of a few dozen boxes."""


@dataclass(slots=True)
class Node:
    """A box, or a place where a long edge crosses a layer (`box` is None). `x`, `y` is the upper left corner."""

    layer: int
    width: float
    height: float
    box: Box | None = None
    x: float = 0.0
    y: float = 0.0
    outs: dict[str, float] = field(default_factory=dict)
    ins: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """A piece of an edge between neighbouring layers; the floats are heights of the ports inside their nodes."""

    source: Node
    out: float
    target: Node
    into: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Placed nodes, and for each edge that is not a back edge the nodes it passes on its way."""

    nodes: dict[str, Node]
    ways: dict[Edge, list[Node]]
    columns: list[tuple[float, float]]
    right: float
    bottom: float


def text_width(text: str, size: float) -> float:
    """An estimate, on the wide side, of a text's width in a common sans-serif font."""
    narrow = sum(text.count(c) for c in "iljtfr.,:;|!'()[] ")
    wide = sum(text.count(c) for c in "mwMWQO@")
    return size * (0.58 * (len(text) - narrow - wide) + 0.34 * narrow + 0.88 * wide)


def lay_out(picture: Picture, left: float = 0.0, top: float = 0.0) -> Layout:
    """Place every box of a picture. Coordinates are in pixels, from (left, top) downwards and to the right."""
    layers = _layers(picture)
    nodes = {box.id: _node(box, layers[box.id]) for box in picture.boxes}
    columns: dict[int, list[Node]] = defaultdict(list)
    for node in nodes.values():
        columns[node.layer].append(node)
    ways, links = _ways(picture, nodes, columns)
    order = [columns[i] for i in range(max(columns, default=-1) + 1)]
    _order(order, links)
    spans = _place_columns(order, _gaps(picture, nodes), left)
    _place_rows(order, links)
    everything = [node for column in order for node in column]
    shift = top - min((n.y for n in everything), default=0.0)
    for node in everything:
        node.y += shift
    bottom = max((n.y + n.height for n in everything), default=top)
    return Layout(nodes, ways, spans, spans[-1][1] if spans else left, bottom)


def _layers(picture: Picture) -> dict[str, int]:
    forward = [e for e in picture.edges if not e.back]
    layer = {box.id: 0 for box in picture.boxes}
    for _ in picture.boxes:  # longest path; as many rounds as there are boxes are enough, for there is no cycle
        changed = False
        for edge in forward:
            if layer[edge.target] <= layer[edge.source] and edge.source != edge.target:
                layer[edge.target] = layer[edge.source] + 1
                changed = True
        if not changed:
            break
    for box in picture.boxes:  # a placeholder stands next to its first reader
        readers = [layer[e.target] for e in forward if e.source == box.id]
        if box.kind == "placeholder" and readers:
            layer[box.id] = min(readers) - 1
    rightmost = max(layer.values(), default=0)
    return {box.id: rightmost if box.kind == "output" else layer[box.id] for box in picture.boxes}


def _node(box: Box, layer: int) -> Node:
    title = text_width(box.title, 13) * 1.06
    subtitle = text_width(box.subtitle, 11)
    if box.kind != "interface":
        width = max(title, subtitle) + 36
        outs, ins = dict.fromkeys(box.outs, PILL / 2), dict.fromkeys(box.ins, PILL / 2)
        return Node(layer, width, PILL, box, outs=outs, ins=ins)
    rows = max(len(box.ins), len(box.outs))
    ports = max((text_width(p, 12) for p in box.ins), default=0) + max((text_width(p, 12) for p in box.outs), default=0)
    width = max(title + 24, subtitle + 24, ports + 52, text_width(box.note, 11) + 24, 120)
    height = HEAD + rows * ROW + PAD + (FOOT if box.note else 0)
    middle = {i: HEAD + PAD / 2 + (i + 0.5) * ROW for i in range(rows)}
    outs = {p: middle[i] for i, p in enumerate(box.outs)}
    return Node(layer, width, height, box, outs=outs, ins={p: middle[i] for i, p in enumerate(box.ins)})


def _ways(
    picture: Picture, nodes: dict[str, Node], columns: dict[int, list[Node]]
) -> tuple[dict[Edge, list[Node]], list[Link]]:
    """Cuts long edges at the layers they cross. Edges from one port share their crossings, so they run as one."""
    ways: dict[Edge, list[Node]] = {}
    links: dict[tuple[int, float, int, float], Link] = {}
    crossings: dict[tuple[str, str, int], Node] = {}
    for edge in picture.edges:
        if edge.back:
            continue
        source, target = nodes[edge.source], nodes[edge.target]
        way = [source]
        for layer in range(source.layer + 1, target.layer):
            key = (edge.source, edge.out, layer)
            if key not in crossings:
                crossings[key] = Node(layer, 0.0, 6.0)
                columns[layer].append(crossings[key])
            way.append(crossings[key])
        way.append(target)
        ways[edge] = way
        for a, b in pairwise(way):
            out = a.outs[edge.out] if a is source else a.height / 2
            into = b.ins[edge.into] if b is target else b.height / 2
            links[id(a), out, id(b), into] = Link(a, out, b, into)
    return ways, list(links.values())


def _order(order: list[list[Node]], links: list[Link]) -> None:
    """Barycentre sweeps; ties keep the declared order. The order with the fewest crossings seen is kept."""
    before, after = _neighbours(links)
    best, fewest = [list(c) for c in order], _crossings(order, links)
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for column in order if forward else reversed(order):
            place = _places(order)
            near = before if forward else after
            keys = {id(n): _mean([place[id(o)] + p for o, p, _ in near[id(n)]], place[id(n)]) for n in column}
            column.sort(key=lambda n, keys=keys: keys[id(n)])  # type: ignore[misc]
        crossings = _crossings(order, links)
        if crossings < fewest:
            best, fewest = [list(c) for c in order], crossings
    order[:] = best


def _places(order: list[list[Node]]) -> dict[int, float]:
    return {id(n): i / max(1, len(c) - 1) if len(c) > 1 else 0.5 for c in order for i, n in enumerate(c)}


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


_Near = dict[int, list[tuple[Node, float, float]]]


def _neighbours(links: list[Link]) -> tuple[_Near, _Near]:
    """For each node its neighbours to the left and to the right, with the place of their port (as a small fraction)."""
    before: _Near = defaultdict(list)
    after: _Near = defaultdict(list)
    for link in links:
        before[id(link.target)].append((link.source, link.out / 1e4, link.into / 1e4))
        after[id(link.source)].append((link.target, link.into / 1e4, link.out / 1e4))
    return before, after


def _crossings(order: list[list[Node]], links: list[Link]) -> int:
    index = {id(n): i for c in order for i, n in enumerate(c)}
    by_layer: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for link in links:
        ends = (index[id(link.source)] + link.out / 1e4, index[id(link.target)] + link.into / 1e4)
        by_layer[link.source.layer].append(ends)
    count = 0
    for pairs in by_layer.values():
        count += sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for i, a in enumerate(pairs) for b in pairs[:i])
    return count


def _gaps(picture: Picture, nodes: dict[str, Node]) -> dict[int, float]:
    """The gap before each layer: wide enough for the labels of the edges that end there."""
    gaps: dict[int, float] = {}
    for edge in picture.edges:
        layer = nodes[edge.target].layer
        gaps[layer] = max(gaps.get(layer, COLUMN_GAP), text_width(edge.label, LABEL) + 72)
    return gaps


def _place_columns(order: list[list[Node]], gaps: dict[int, float], left: float) -> list[tuple[float, float]]:
    x, spans = left, []
    for layer, column in enumerate(order):
        x += gaps.get(layer, COLUMN_GAP) if layer else 0
        width = max((n.width for n in column), default=0.0)
        for node in column:
            node.x = x if node.box is None else x + (width - node.width) / 2
            if node.box is None:
                node.width = width
        spans.append((x, x + width))
        x += width
    return spans


def _place_rows(order: list[list[Node]], links: list[Link]) -> None:
    for column in order:
        y = 0.0
        for node in column:
            node.y = y
            y += node.height + BOX_GAP
    wanted_left: dict[int, list[Link]] = defaultdict(list)
    wanted_right: dict[int, list[Link]] = defaultdict(list)
    for link in links:
        wanted_left[id(link.target)].append(link)
        wanted_right[id(link.source)].append(link)
    for sweep in range(_SWEEPS * 2):
        for column in order if sweep % 2 == 0 else reversed(order):
            wishes = []
            for n in column:
                left = [link.source.y + link.out - link.into for link in wanted_left[id(n)]]
                right = [link.target.y + link.into - link.out for link in wanted_right[id(n)]]
                near = left if sweep % 2 == 0 else right
                wishes.append(_mean((left + right) if sweep >= _SWEEPS else near, n.y))
            _settle(column, wishes)


def _settle(column: list[Node], wishes: list[float]) -> None:
    """Heights as near to the wishes as the order and the gaps allow, in least squares (pool adjacent violators)."""
    shift, offsets = 0.0, []
    for node, following in zip(column, [*column[1:], None], strict=True):
        offsets.append(shift)
        gap = LANE_GAP if node.box is None and following is not None and following.box is None else BOX_GAP
        shift += node.height + gap
    pools: list[list[float]] = []  # [sum of weighted wishes, weight, members]
    for node, wish, offset in zip(column, wishes, offsets, strict=True):
        weight = 4.0 if node.box is None else 1.0
        pools.append([weight * (wish - offset), weight, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            top = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], top, strict=True)]
    index = 0
    for total, weight, members in pools:
        for _ in range(int(members)):
            column[index].y = total / weight + offsets[index]
            index += 1
