"""Frames of a field in path order, although they arrive in any order.

`InOrder` holds what has arrived under one prefix and hands it out by path as far as it is known without a gap. It is
what joins, windows and the client's outputs are built on.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from omni_flow.control.facts import WAITING, Cell, Failure, Torn
from omni_flow.control.plan import Path


class Ended:
    """Type of the marks that `pull` returns besides cells."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


END_OF_FRAMES: Final = Ended("END_OF_FRAMES")
TORN: Final = Ended("TORN")
UNKNOWN: Final = Failure("", "", "the stream ended torn: its creator failed")


class Passed(NamedTuple):
    """A number that lies wholly behind the reader: everything under it has been handed out."""

    parent: Path
    number: int


class InOrder:
    """Frames under one prefix over `levels` >= 1 sources.

    Paths and parents given to it are relative to the prefix. What was added twice counts once.
    """

    __slots__ = ("_cells", "_children", "_count", "_levels", "_next", "_parent", "_torn", "cause")

    def __init__(self, levels: int, parent: Path = ()) -> None:
        self._levels = levels
        self._parent = parent
        self._next = 0
        self._count: int | None = None
        self._torn: Torn = False
        self.cause = UNKNOWN
        self._cells: dict[int, Cell] = {}
        self._children: dict[int, InOrder] = {}

    def add(self, path: Path, cell: Cell) -> bool:
        """Take the fact at `path` (length `levels`). False if it is behind the reader or known already."""
        number = path[0]
        if number < self._next:
            return False
        if self._levels == 1:
            if number in self._cells:
                return False
            self._cells[number] = cell
            return True
        return self._child(number).add(path[1:], cell)

    def end(self, parent: Path, count: int, torn: Torn) -> None:
        """Take the end of the source under `parent` (length 0 to levels - 1)."""
        if not parent:
            if self._count is None:
                self._count, self._torn = count, torn
        elif parent[0] >= self._next:
            self._child(parent[0]).end(parent[1:], count, torn)

    def _child(self, number: int) -> InOrder:
        child = self._children.get(number)
        if child is None:
            child = self._children[number] = InOrder(self._levels - 1, (*self._parent, number))
        return child

    def pull(self, passed: list[Passed] | None = None, through: bool = False) -> Cell | Ended:
        """The next frame in order; WAITING if it is not known yet; else END_OF_FRAMES or TORN, from then on.

        With TORN `cause` is the failure that tore the stream, as far as known.

        Numbers left behind, also those of an inner stream that ends, are appended to `passed`. `through`: go on after
        an inner stream that ended torn, for a reader that only lets frames pass.
        """
        while True:
            if self._next == self._count:
                if type(self._torn) is Failure:
                    self.cause = self._torn
                return TORN if self._torn else END_OF_FRAMES
            if self._levels == 1:
                cell = self._cells.pop(self._next, WAITING)
                if cell is not WAITING:
                    self._step(passed)
                return cell
            child = self._children.get(self._next)
            if child is None:
                return WAITING
            cell = child.pull(passed, through)
            if cell is not END_OF_FRAMES and not (through and cell is TORN):
                self.cause = child.cause
                return cell
            del self._children[self._next]
            self._step(passed)

    def _step(self, passed: list[Passed] | None) -> None:
        if passed is not None:
            passed.append(Passed(self._parent, self._next))
        self._next += 1

    def behind(self, path: Path) -> bool:
        """Whether everything at `path` has been handed out."""
        if not path or path[0] != self._next or self._levels == 1:
            return bool(path) and path[0] < self._next
        child = self._children.get(path[0])
        return child is not None and child.behind(path[1:])

    def drain(self) -> list[int]:
        """Forget the frames held (`levels` is 1) and return their numbers. For readers that are done."""
        numbers = list(self._cells)
        self._cells.clear()
        return numbers

    @property
    def held(self) -> int:
        """Frames held, for census and tests."""
        return len(self._cells) + sum(c.held for c in self._children.values())
