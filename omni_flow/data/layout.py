"""KV objects by layer range and head range, and the plan that gathers a reader's share from the writers' objects.

Pure: knows no socket, clock or torch. Canonical bytes of one page of one attention group are a K block
`[layers, tokens, heads, key_bytes]` followed by a V block `[layers, tokens, heads, value_bytes]`. An object holds
a rectangle of layers x heads of that page (a `Box`) in the same order. Its name says what it holds, never who wrote
it, so a writer with tensor parallelism m and a reader with n share one chain of page hashes. The last axis is
counted in bytes: any element type, packed ones included, moves unchanged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_flow.data.identity import ObjectRange

Bytes = npt.NDArray[np.uint8]


class LayoutError(ValueError):
    """A share, name or plan that cannot exist; the text names it and the mend."""


class NotCovered(LayoutError):
    """The given objects do not hold all that the reader needs."""


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Half-open range of layers or of KV heads, never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise LayoutError(f"range {self.start}:{self.stop} is empty or negative; give 0 <= start < stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def intersect(self, other: "Range") -> "Range | None":
        """The common part, None when there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Range(start, stop) if start < stop else None

    def within(self, origin: "Range") -> slice:
        """This range as a slice of an axis that begins at `origin`."""
        return slice(self.start - origin.start, self.stop - origin.start)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangle of layers x KV heads."""

    layers: Range
    heads: Range

    def __str__(self) -> str:
        return f"layers {self.layers} heads {self.heads}"

    @property
    def area(self) -> int:
        return len(self.layers) * len(self.heads)

    def intersect(self, other: "Box") -> "Box | None":
        layers, heads = self.layers.intersect(other.layers), self.heads.intersect(other.heads)
        return Box(layers, heads) if layers and heads else None

    def named(self, group: int) -> ObjectRange:
        """The name, under a page hash, of the object that holds this box of attention group number `group`."""
        return ObjectRange(self.layers.start, self.layers.stop, self.heads.start, self.heads.stop, group)

    @classmethod
    def of(cls, name: ObjectRange) -> "Box":
        """What an object of that name holds."""
        return cls(Range(name.layer_start, name.layer_stop), Range(name.head_start, name.head_stop))

    def minus(self, hole: "Box") -> Iterator["Box"]:
        """What is left of this box around `hole`, which lies inside it: at most four disjoint boxes."""
        if self.layers.start < hole.layers.start:
            yield Box(Range(self.layers.start, hole.layers.start), self.heads)
        if hole.layers.stop < self.layers.stop:
            yield Box(Range(hole.layers.stop, self.layers.stop), self.heads)
        if self.heads.start < hole.heads.start:
            yield Box(hole.layers, Range(self.heads.start, hole.heads.start))
        if hole.heads.stop < self.heads.stop:
            yield Box(hole.layers, Range(hole.heads.stop, self.heads.stop))


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers of one model that share a KV shape.

    Args: `tokens` per page; `key_bytes` and `value_bytes` per head and token. A multi-head latent group (MLA) has one
    head, no V block (`value_bytes=0`), and every rank reads all of it.
    """

    name: str
    layers: int
    kv_heads: int
    tokens: int
    key_bytes: int
    value_bytes: int

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.tokens, self.key_bytes) < 1 or self.value_bytes < 0:
            raise LayoutError(f"attention group {self.name!r} has a size below 1: {self}")

    @classmethod
    def mla(cls, name: str, *, layers: int, tokens: int, latent_bytes: int) -> "AttentionGroup":
        """A latent group: one vector of `latent_bytes` (latent and rotary part) for each token and layer."""
        return cls(name, layers, 1, tokens, latent_bytes, 0)

    @property
    def whole(self) -> Box:
        return Box(Range(0, self.layers), Range(0, self.kv_heads))

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of the last axis of each block: (K, V), or (latent,)."""
        return (self.key_bytes, self.value_bytes) if self.value_bytes else (self.key_bytes,)

    def nbytes(self, box: Box) -> int:
        """Bytes of the object that holds `box`."""
        return box.area * self.tokens * sum(self.widths)

    def heads_of(self, tp: int, rank: int) -> Range:
        """KV heads that tensor-parallel rank `rank` of `tp` reads.

        With fewer heads than ranks, neighbouring ranks hold the same head. Raises: LayoutError when neither number
        divides the other.
        """
        if not 0 <= rank < tp:
            raise LayoutError(f"rank {rank} is not below tensor parallelism {tp}")
        if self.kv_heads % tp == 0:
            each = self.kv_heads // tp
            return Range(rank * each, (rank + 1) * each)
        if tp % self.kv_heads == 0:
            head = rank * self.kv_heads // tp
            return Range(head, head + 1)
        raise LayoutError(
            f"{self.kv_heads} KV heads of group {self.name!r} cannot be shared by {tp} ranks; "
            "choose a tensor parallelism that divides them or is a multiple of them"
        )

    def layers_of(self, pp: int, stage: int) -> Range:
        """Layers of pipeline stage `stage` of `pp`; the first stages take the remainder."""
        if not 0 <= stage < pp <= self.layers:
            raise LayoutError(f"stage {stage} of {pp} does not exist for {self.layers} layers")
        each, more = divmod(self.layers, pp)
        start = stage * each + min(stage, more)
        return Range(start, start + each + (stage < more))

    def share(self, tp: int, rank: int, pp: int = 1, stage: int = 0) -> Box:
        """What one rank reads and holds."""
        return Box(self.layers_of(pp, stage), self.heads_of(tp, rank))

    def writes(self, tp: int, rank: int) -> bool:
        """Whether this rank stores its share: of ranks with the same heads only the first does, so each head, and
        each latent, is stored once."""
        return rank == 0 or self.heads_of(tp, rank) != self.heads_of(tp, rank - 1)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a rectangle from source object number `source` to the target; the slices count from each one's origin."""

    source: int
    box: Box
    source_layers: slice
    source_heads: slice
    target_layers: slice
    target_heads: slice


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Disjoint moves that fill `target` exactly once from `sources`."""

    group: AttentionGroup
    target: Box
    sources: tuple[Box, ...]
    moves: tuple[Move, ...]

    @property
    def used(self) -> tuple[int, ...]:
        """Numbers of the sources that are read at all, ascending."""
        return tuple(sorted({move.source for move in self.moves}))

    def run(self, sources: Sequence[Sequence[Bytes]], target: Sequence[Bytes]) -> None:
        """Copy from view to view, block by block, nothing in between.

        Args: one sequence of block views (`object_views` or `arena_views`) for each source, in plan order; unused ones
        may be empty. `target`: the views to fill.
        """
        for move in self.moves:
            for source_block, target_block in zip(sources[move.source], target, strict=True):
                np.copyto(
                    target_block[move.target_layers, :, move.target_heads],
                    source_block[move.source_layers, :, move.source_heads],
                )

    def byte_runs(self, source: int) -> npt.NDArray[np.uint64]:
        """Rows (target offset, source offset, length) that fetch source number `source` by a transfer driver.

        Offsets count from the begin of each contiguous object. Touching runs are joined: whole layers when all heads
        of both sides move, else one run for each layer and token.
        """
        parts = [self._runs(move) for move in self.moves if move.source == source]
        return np.concatenate(parts) if parts else np.empty((0, 3), np.uint64)

    def _runs(self, move: Move) -> npt.NDArray[np.uint64]:
        rows = []
        tokens, origin = self.group.tokens, self.sources[move.source]
        target_base = source_base = 0
        layers = np.arange(len(move.box.layers), dtype=np.int64)[:, None]
        token = np.arange(tokens, dtype=np.int64)[None, :]
        for width in self.group.widths:
            target_row, source_row = len(self.target.heads) * width, len(origin.heads) * width
            target_at = ((move.target_layers.start + layers) * tokens + token) * target_row
            source_at = ((move.source_layers.start + layers) * tokens + token) * source_row
            target_at = target_base + target_at.ravel() + move.target_heads.start * width
            source_at = source_base + source_at.ravel() + move.source_heads.start * width
            length = np.full(target_at.size, len(move.box.heads) * width)
            rows.append(np.stack([target_at, source_at, length], axis=1))
            target_base += len(self.target.layers) * tokens * target_row
            source_base += len(origin.layers) * tokens * source_row
        return join_runs(np.concatenate(rows)).astype(np.uint64)


def plan_gather(group: AttentionGroup, target: Box, sources: Iterable[Box]) -> GatherPlan:
    """Which source gives which part of `target`.

    Sources with the largest common part are used first, equal ones in the order given (so put near ones first); what
    several hold is copied once. Raises: NotCovered, naming the missing rectangles.
    """
    boxes = tuple(sources)
    overlaps = [(box.intersect(target), number) for number, box in enumerate(boxes)]
    order = sorted(((o.area, n) for o, n in overlaps if o), key=lambda pair: (-pair[0], pair[1]))
    missing, moves = [target], list[Move]()
    for _, number in order:
        left: list[Box] = []
        for gap in missing:
            common = gap.intersect(boxes[number])
            if common is None:
                left.append(gap)
                continue
            moves.append(_move(number, common, boxes[number], target))
            left.extend(gap.minus(common))
        missing = left
    if missing:
        parts = "; ".join(str(box) for box in missing)
        raise NotCovered(
            f"group {group.name!r}: no object holds {parts} (target {target}, {len(boxes)} objects given); "
            "recompute the page or name the other writers' objects"
        )
    return GatherPlan(group, target, boxes, tuple(moves))


def _move(number: int, common: Box, source: Box, target: Box) -> Move:
    return Move(
        number,
        common,
        common.layers.within(source.layers),
        common.heads.within(source.heads),
        common.layers.within(target.layers),
        common.heads.within(target.heads),
    )


def join_runs(runs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Join neighbouring rows (target, source, length) that continue each other on both sides."""
    if len(runs) < 2:
        return runs
    ends = runs[:, :2] + runs[:, 2:]
    starts = np.concatenate([[True], np.any(runs[1:, :2] != ends[:-1], axis=1)])
    first = np.flatnonzero(starts)
    joined = runs[first].copy()
    joined[:, 2] = np.add.reduceat(runs[:, 2], first)
    return joined


def object_views(
    group: AttentionGroup, box: Box, buffer: "bytearray | memoryview | Bytes", offset: int = 0
) -> tuple[Bytes, ...]:
    """Block views `[layers, tokens, heads, width]` of the contiguous object that lies at `offset` of `buffer`."""
    views = []
    for width in group.widths:
        shape = (len(box.layers), group.tokens, len(box.heads), width)
        views.append(np.ndarray(shape, np.uint8, buffer, offset))
        offset += box.area * group.tokens * width
    return tuple(views)


def arena_views(
    group: AttentionGroup,
    box: Box,
    buffer: "bytearray | memoryview | Bytes",
    page: int,
    pages: int,
    offset: int = 0,
) -> tuple[Bytes, ...]:
    """Block views of page number `page` in a layer-major engine arena of `pages` pages.

    The arena is `[layers, pages, tokens, heads, key_bytes]` at `offset`, then the same for V.
    """
    if not 0 <= page < pages:
        raise LayoutError(f"page {page} is not among the {pages} pages of the arena")
    views = []
    for width in group.widths:
        shape = (len(box.layers), pages, group.tokens, len(box.heads), width)
        views.append(np.ndarray(shape, np.uint8, buffer, offset)[:, page])
        offset += box.area * pages * group.tokens * width
    return tuple(views)
