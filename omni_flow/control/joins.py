"""Joins: tiny state machines that turn the frames under one prefix into one input, or into windows.

Each takes facts and ends in any order and decides by frames in path order only, so the order of arrival never shows.
A list is never empty: nothing present is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omni_flow.control.facts import ABSENT, WAITING, Cell, Failure, Torn
from omni_flow.control.inorder import END_OF_FRAMES, TORN, InOrder, Passed
from omni_flow.control.plan import Slot
from omni_flow.control.spec import Join


class Closing:
    """`collect`, `count` and `last` of one field under one prefix.

    `join` and `levels` are the slot's. `n` is the cell of a count's n (WAITING until known), already decoded.
    `decide()` is the fact of the slot, or WAITING; once decided, drop the object.
    """

    __slots__ = ("_failure", "_join", "_over", "_values", "frames", "n")

    def __init__(self, join: Join, levels: int, n: Cell) -> None:
        self.frames = InOrder(levels)
        self.n = n
        self._join = join
        self._values: list[Any] = []
        self._over = False
        self._failure: Failure | None = None

    def decide(self) -> Cell:
        """The list, the last value, ABSENT, a Failure, or WAITING while frames in order don't decide it."""
        if self._join is Join.COUNT:
            return self._count()
        self._pull(None)
        if self._failure is not None:
            return self._failure
        if not self._over:
            return WAITING
        if not self._values:
            return ABSENT
        return self._values[-1] if self._join is Join.LAST else self._values

    def _count(self) -> Cell:
        n = self.n
        if n is WAITING:
            return WAITING
        if n is ABSENT:
            return ABSENT
        if isinstance(n, Failure):
            return n
        if type(n) is not int:
            return Failure("", "", f"count needs an int n, got {type(n).__name__} {n!r:.60}")
        if n <= 0:
            return ABSENT
        self._pull(n)
        if len(self._values) >= n:
            return self._values[:n]
        if self._failure is not None:
            return self._failure
        return ABSENT if self._over else WAITING

    def _pull(self, limit: int | None) -> None:
        while self._failure is None and not self._over and (limit is None or len(self._values) < limit):
            cell = self.frames.pull()
            if cell is WAITING:
                return
            if cell is END_OF_FRAMES:
                self._over = True
            elif cell is TORN:
                self._failure = self.frames.cause
            elif type(cell) is Failure:
                self._failure = cell
            elif cell is not ABSENT:
                if self._join is Join.LAST:
                    self._values.clear()
                self._values.append(cell)


class Windows:
    """The windows of one stream under one parent, cut by size and stride or by a policy.

    `next()` gives the values of the next window, or None if it isn't known yet or there is none; `result` then says
    (count, torn) once no window can follow. Numbers of the stream that no later window needs are put into `released`.
    """

    __slots__ = ("_base", "_cells", "_decode", "_numbers", "_over", "_seen", "_slot", "_start", "_values", "born",
                 "frames", "released", "result")  # fmt: skip

    def __init__(self, slot: Slot, decode: Callable[[Any], Any]) -> None:
        self.frames = InOrder(1)
        self.born = 0
        self.result: tuple[int, Torn] | None = None
        self.released: list[int] = []
        self._slot = slot
        self._decode = decode
        self._cells: list[Any] = []
        self._values: list[Any] = []  # what a policy looks at; what runs gets the cells and decodes them by its types
        self._numbers: list[int] = []
        self._base = 0
        self._start = 0
        self._seen = 0
        self._over: Torn | None = None

    def add(self, number: int, cell: Cell) -> None:
        """Take the frame `number`; once all windows are known it is released at once."""
        if self.result is not None:
            self.released.append(number)
        else:
            self.frames.add((number,), cell)

    def next(self) -> list[Any] | None:
        """The next window that exists by the frames in order, counted in `born`."""
        while self.result is None:
            self._pull()
            stop = self._stop()
            if stop is not None:
                low = max(self._start - self._slot.left, 0) - self._base
                window = self._cells[low : stop - self._base]
                self.born += 1
                self._start = stop if self._slot.policy is not None else self.born * self._slot.stride
                self._drop(self._start - self._slot.left)
                return window
            if self._over is None:
                return None
            self.result = (self.born, self._over)
            self._drop(self._base + len(self._cells))
            self.released += self.frames.drain()
        return None

    def _pull(self) -> None:
        passed: list[Passed] = []
        while self._over is None:
            cell = self.frames.pull(passed)
            if cell is WAITING:
                return
            if cell is END_OF_FRAMES:
                self._over = False
            elif cell is TORN:
                self._over = self.frames.cause
            elif type(cell) is Failure:
                self._over = cell
                self.released.append(passed[-1].number)
            elif cell is ABSENT:
                self.released.append(passed[-1].number)
            else:
                if self._slot.policy is not None:
                    self._values.append(self._decode(cell))
                self._cells.append(cell)
                self._numbers.append(passed[-1].number)
                self._drop(self._start - self._slot.left)

    def _stop(self) -> int | None:
        """Where the next window stops (index among the present frames), or None if it doesn't exist (yet)."""
        total = self._base + len(self._cells)
        if self._slot.policy is not None:
            return self._cut(total)
        full = self._start + self._slot.size
        if full <= total:
            return full
        fresh = self.born == 0 or self._start - self._slot.stride + self._slot.size < total
        if self._over is False and self._start < total and fresh:
            return total
        return None

    def _cut(self, total: int) -> int | None:
        """Ask the policy once per frame that came in order, so that the order of arrival can't show."""
        policy, base = self._slot.policy, self._base
        assert policy is not None
        self._seen = max(self._seen, self._start)
        while self._seen <= total:
            if self._seen > self._start:
                stop = policy.cut(self._values[: self._seen - base], self._start - base, False)
                if stop is None and self._seen - self._start >= policy.max_frames:
                    stop = self._seen - base
                if stop is not None:
                    return self._checked(stop + base, self._seen)
            self._seen += 1
        if self._over is False and self._start < total:
            stop = policy.cut(self._values, self._start - base, True)
            return total if stop is None else self._checked(stop + base, total)
        return None

    def _checked(self, stop: int, known: int) -> int:
        if not self._start < stop <= known:
            raise ValueError(
                f"window policy {self._slot.policy!r} cut a window at {stop} that starts at {self._start}, with "
                f"{known} frames known"
            )
        return stop

    def _drop(self, before: int) -> None:
        """Forget frames whose index is below `before`."""
        gone = min(max(before - self._base, 0), len(self._cells))
        if gone:
            self.released += self._numbers[:gone]
            del self._cells[:gone], self._values[:gone], self._numbers[:gone]
            self._base += gone

    def tear(self) -> None:
        """The policy broke: no window follows, and the windows end torn."""
        self.result = (self.born, True)
        self._drop(self._base + len(self._cells))
        self.released += self.frames.drain()

    @property
    def held(self) -> int:
        """Frames held, for census and tests."""
        return len(self._cells) + self.frames.held
