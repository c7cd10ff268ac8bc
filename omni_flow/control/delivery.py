"""What the client receives: one output's values in path order, up to the first failure.

The gateway holds one `Delivery` per graph output, hidden ones included; it is to the client what a share's slots are to
an activation. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from omni_flow.control.facts import ABSENT, WAITING, Cell, Failure, Torn
from omni_flow.control.inorder import END_OF_FRAMES, TORN, InOrder, Passed
from omni_flow.control.joins import Closing
from omni_flow.control.plan import ClientOutput, Path
from omni_flow.control.spec import Join, ParamRef


class Delivered(NamedTuple):
    """One value for the client (`value` is a payload), and the numbers that are done once it took it."""

    output: int
    value: Any
    passed: list[Passed]


class Delivery:
    """One graph output. `decided` once nothing more will be delivered; `failure` says why it stopped short.

    Facts and ends go in, in any order; `pull` hands out. After a failure it only lets numbers pass, so that creators
    that wait for the client go on.
    """

    __slots__ = ("_decode", "_joins", "_ns", "_order", "_params", "_single", "decided", "failure", "output")

    def __init__(self, output: ClientOutput, params: Mapping[str, Any], decode: Callable[[Any], Any]) -> None:
        self.output = output
        self.decided = False
        self.failure: Failure | None = None
        self._params = params
        self._decode = decode
        self._order = InOrder(output.depth) if output.depth else None
        self._single: Cell = WAITING
        self._joins: dict[Path, Closing | None] = {}
        self._ns: dict[Path, Cell] = {}

    def fact(self, path: Path, cell: Cell) -> None:
        """Take a fact of the output's field."""
        if self.output.join is Join.PLAIN:
            self._settle(path, cell)
            return
        prefix = path[: self.output.depth]
        join = self._join(prefix)
        if join is not None:
            join.frames.add(path[self.output.depth :], cell)
            self._decide(prefix, join)

    def n(self, path: Path, cell: Cell) -> None:
        """Take a fact of the field that holds a count's n."""
        if path in self._ns:
            return
        self._ns[path] = cell = cell if cell is ABSENT or type(cell) is Failure else self._decode(cell)
        for prefix, join in list(self._joins.items()):
            if join is not None and prefix[: len(path)] == path:
                join.n = cell
                self._decide(prefix, join)

    def end(self, parent: Path, count: int, torn: Torn) -> None:
        """Take the end of a source of the field's scope."""
        if len(parent) < self.output.depth:
            assert self._order is not None
            self._order.end(parent, count, torn)
            return
        prefix = parent[: self.output.depth]
        join = self._join(prefix)
        if join is not None:
            join.frames.end(parent[self.output.depth :], count, torn)
            self._decide(prefix, join)

    def pull(self) -> tuple[list[Delivered], list[Passed]]:
        """What can be delivered now, and the numbers that are done without any value."""
        given: list[Delivered] = []
        idle: list[Passed] = []
        if self._order is None:
            cell, self._single = self._single, WAITING
            if cell is not WAITING and not self.decided:
                self.decided = True
                if type(cell) is Failure:
                    self.failure = cell
                elif cell is not ABSENT:
                    given.append(Delivered(self.output.index, cell, []))
            return given, idle
        while True:
            passed: list[Passed] = []
            cell = self._order.pull(passed, through=self.decided)
            if cell is WAITING or cell is END_OF_FRAMES or (cell is TORN and self.decided):
                self.decided = self.decided or cell is END_OF_FRAMES
                return given, idle + passed
            if cell is TORN:
                self._fail(self._order.cause)
            elif type(cell) is Failure:
                self._fail(cell)
            elif cell is not ABSENT and not self.decided:
                given.append(Delivered(self.output.index, cell, passed))
                continue
            idle += passed

    def _fail(self, failure: Failure) -> None:
        if not self.decided:
            self.failure = failure
            self.decided = True

    def _join(self, prefix: Path) -> Closing | None:
        """The gathering join under `prefix`; None if it is decided."""
        if prefix not in self._joins:
            n: Cell = self.output.n
            if isinstance(n, ParamRef):
                n = self._params[n.name]
            elif self.output.n_field is not None:
                n = next((c for p, c in self._ns.items() if prefix[: len(p)] == p), WAITING)
            self._joins[prefix] = Closing(self.output.join, self.output.levels, n)
        return self._joins[prefix]

    def _decide(self, prefix: Path, join: Closing) -> None:
        cell = join.decide()
        if cell is not WAITING:
            self._joins[prefix] = None
            self._settle(prefix, cell)

    def _settle(self, path: Path, cell: Cell) -> None:
        if self._order is not None:
            self._order.add(path, cell)
        elif not self.decided:
            self._single = cell
