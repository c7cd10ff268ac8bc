"""Buckets and the tree of prefixes in which they lie.

Each interface of a share has one tree of `Node`s: a node is a prefix of activation paths, a leaf (depth of the
interface's scope) is the bucket of one activation. What a slot receives is kept once, at the node of its prefix, and
shared by all buckets below. A node that is done is replaced by one bit in its parent; a parent whose numbers are all
done, by one in its own; at last the whole interface is one tombstone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from omni_flow.control.credit import Account
from omni_flow.control.facts import ABSENT, WAITING, Cell, Failure, Torn
from omni_flow.control.joins import Closing, Windows
from omni_flow.control.plan import Entry

OPEN: Final = 1
READY: Final = 2
RUNNING: Final = 3


UNFAILED: Final = 1 << 62


class Node:
    """A prefix and what is known under it.

    `cells[slot]` is the decided fact of each slot whose scope ends here (WAITING until then), `joins` hold those
    that gather. `count`, `torn`: the end of the source that numbers the children, once known. `low`: all numbers
    below it are done; `done`: the other done numbers; `closed`: how many in all; `mine`: how many there are on this
    share, once asked for (-1 before). `ordering`: its children are being run or failed in order right now.
    `failed`: the lowest number that failed, for `ordered`. `state` is that of a bucket: 0 (not open), OPEN, READY,
    RUNNING; `verdict` the group that decided, `activation` what runs. `above` are the nodes from the root to the
    parent.
    """

    __slots__ = ("above", "accounts", "activation", "cells", "children", "closed", "count", "done", "failed", "joins",
                 "low", "mine", "number", "ordering", "parent", "path", "state", "torn", "verdict")  # fmt: skip

    def __init__(self, parent: Node | None, number: int, slots: int) -> None:
        self.parent = parent
        self.number = number
        self.path: tuple[int, ...] = (*parent.path, number) if parent is not None else ()
        self.above: tuple[Node, ...] = (*parent.above, parent) if parent is not None else ()
        self.cells: list[Cell] = [WAITING] * slots
        self.joins: dict[int, Closing | Windows] | None = None
        self.children: dict[int, Node] | None = None
        self.accounts: dict[int, Account] | None = None
        self.activation: Any = None
        self.count: int | None = None
        self.torn: Torn = False
        self.failed = UNFAILED
        self.low = 0
        self.closed = 0
        self.done: set[int] | None = None
        self.state = 0
        self.verdict = -1
        self.ordering = False
        self.mine = -1

    def at(self, depth: int) -> Node:
        """The node at `depth` on the way from the root to this one, which may be it."""
        return self if depth == len(self.above) else self.above[depth]

    def is_done(self, number: int) -> bool:
        """Whether the child `number` is a tombstone."""
        return number < self.low or (self.done is not None and number in self.done)

    def child(self, number: int, slots: int) -> Node | None:
        """The child `number`, made if need be; None if it is a tombstone."""
        children = self.children
        if children is None:
            children = self.children = {}
        else:
            known = children.get(number)
            if known is not None:
                return known
        if number < self.low or (self.done is not None and number in self.done):
            return None
        made = children[number] = Node(self, number, slots)
        return made

    def finish(self, number: int, elsewhere: Callable[[int], bool] | None = None) -> None:
        """Replace the child `number` by its bit. `elsewhere` says which numbers another share owns."""
        if self.children is not None:
            self.children.pop(number, None)
        self.closed += 1
        if self.done is None:
            if number == self.low and elsewhere is None:
                self.low = number + 1
                return
            self.done = set()
        done = self.done
        done.add(number)
        while self.low in done or (elsewhere is not None and elsewhere(self.low)):
            done.discard(self.low)
            self.low += 1
        if not done:
            self.done = None


WAIT: Final = -1
DEAD: Final = -2
FAIL: Final = -3


def decide(
    groups: Sequence[tuple[Entry, ...]], order: Sequence[int], leaf: Node, race: bool
) -> tuple[int, Failure | None]:
    """Which group an activation runs on: (its index or WAIT, DEAD or FAIL; with FAIL, the failure).

    Groups are looked at in declared order and the first that is not dead decides. With `race` the first that is ready
    wins, and the activation fails only if none can become ready.
    """
    waiting = False
    failure: Failure | None = None
    for index in order:
        state, cause = verdict(groups[index], leaf)
        if state == DEAD:
            continue
        if state == 0:
            return index, None
        if not race:
            return state, cause
        if state == WAIT:
            waiting = True
        elif failure is None:
            failure = cause
    if waiting:
        return WAIT, None
    return (FAIL, failure) if failure is not None else (DEAD, None)


def verdict(group: tuple[Entry, ...], leaf: Node) -> tuple[int, Failure | None]:
    """0 if the group is ready, else WAIT, DEAD or FAIL; given as soon as waiting slots can't change it."""
    waiting = needed_waits = False
    all_absent = True
    failure: Failure | None = None
    for entry in group:
        cell = leaf.at(entry.depth).cells[entry.slot]
        if cell is WAITING:
            waiting = True
            all_absent = False
            if not entry.optional:
                needed_waits = True
        elif cell is ABSENT:
            if not entry.optional:
                return DEAD, None
        else:
            all_absent = False
            if failure is None and type(cell) is Failure:
                failure = cell
    if all_absent:
        return DEAD, None
    if failure is not None and not needed_waits:
        return FAIL, failure
    return (WAIT, None) if waiting or failure is not None else (0, None)


def inputs(group: tuple[Entry, ...], leaf: Node) -> dict[str, Any]:
    """The arguments of an activation by parameter; absent optional slots are left to the method's default."""
    found = {}
    for entry in group:
        cell = leaf.at(entry.depth).cells[entry.slot]
        if cell is not ABSENT:
            found[entry.param] = cell
    return found
