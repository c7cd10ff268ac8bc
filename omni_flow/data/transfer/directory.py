"""Who holds what: the objects of other nodes by the first 8 bytes of their keys. Pure: time is passed in.

A node tells the others what has come and gone at it as numbered deltas; whoever misses one asks for the whole. The
directory only says where to ask: 8 bytes may be those of another key, and an object may have gone, so the holder
itself looks up the whole key when it pins.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

NONE: U64 = np.empty(0, np.uint64)
_OVERLAY = 4096
_OVER_S = 600.0
"""How long what a node has said may be on its way."""


def prefixes(keys: U8) -> U64:
    """First 8 bytes of each 32-byte key as a number."""
    return np.ascontiguousarray(keys[:, :8]).view("<u8").ravel()


class Holdings:
    """A set of key prefixes: a sorted array, and the changes since it was last made anew. About 8 bytes a key."""

    def __init__(self, numbers: U64 = NONE) -> None:
        self._sorted = np.unique(numbers)
        self._changes: dict[int, bool] = {}

    def apply(self, added: U64, removed: U64) -> None:
        """Take in a delta; what is both removed and added is there afterwards."""
        self._changes.update(dict.fromkeys(removed.tolist(), False))
        self._changes.update(dict.fromkeys(added.tolist(), True))
        if len(self._changes) > max(_OVERLAY, len(self._sorted) // 16):
            self._sorted = self.snapshot()
            self._changes = {}

    def contains(self, numbers: U64) -> Mask:
        """Per number whether it is there."""
        at = np.searchsorted(self._sorted, numbers)
        found = np.zeros(len(numbers), np.bool_)
        inside = at < len(self._sorted)
        found[inside] = self._sorted[at[inside]] == numbers[inside]
        if self._changes:
            get = self._changes.get
            for place, number in enumerate(numbers.tolist()):
                change = get(number)
                if change is not None:
                    found[place] = change
        return found

    def snapshot(self) -> U64:
        """All numbers, ascending."""
        there = np.array([n for n, present in self._changes.items() if present], np.uint64)
        gone = np.array([n for n, present in self._changes.items() if not present], np.uint64)
        kept = self._sorted[~np.isin(self._sorted, gone)] if len(gone) else self._sorted
        return np.union1d(kept, there)


@dataclass(slots=True)
class _Node:
    epoch: int
    sequence: int
    heard: float
    known: bool = False
    pools: dict[str, Holdings] = field(default_factory=dict)


class Directory:
    """Rows of other nodes. A node is known by name and epoch: a new epoch is a new life, without the old rows.

    Args: `silent_s`, how long a node may say nothing before it counts as dead.
    """

    def __init__(self, silent_s: float) -> None:
        self.silent_s = silent_s
        self._nodes: dict[str, _Node] = {}
        self._over: dict[tuple[str, int], float] = {}

    def nodes(self) -> tuple[str, ...]:
        """Names of the living nodes, sorted."""
        return tuple(sorted(self._nodes))

    def epoch(self, name: str) -> int | None:
        """The life that a node is in, None: it does not live."""
        node = self._nodes.get(name)
        return None if node is None else node.epoch

    def is_over(self, name: str, epoch: int) -> bool:
        """Whether a node lives and this was an earlier life of it; of a node that was silent this may be the present
        one."""
        node = self._nodes.get(name)
        return node is not None and node.epoch != epoch and (name, epoch) in self._over

    def heard(self, name: str, epoch: int, now: float) -> bool:
        """A sign of life; True when it is that of a new life (the old one's rows are gone). One that comes late, of a
        life that is over, counts for nothing."""
        if self.is_over(name, epoch):
            return False
        node = self._nodes.get(name)
        if node is None or node.epoch != epoch:
            if node is not None:
                self._over[name, node.epoch] = now
            self._over.pop((name, epoch), None)
            self._nodes[name] = _Node(epoch, 0, now)
            return True
        node.heard = now
        return False

    def replace(self, name: str, epoch: int, sequence: int, pools: Mapping[str, U64]) -> None:
        """All rows of a node as they were at a number of its deltas."""
        node = self._nodes.get(name)
        if node is None or node.epoch != epoch:
            return
        node.pools = {pool: Holdings(numbers) for pool, numbers in pools.items()}
        node.sequence, node.known = sequence, True

    def delta(self, name: str, epoch: int, sequence: int, changes: Mapping[str, tuple[U64, U64]]) -> bool:
        """Take in (added, removed) by pool. False when an earlier delta is missing: ask for the whole.

        A delta without changes repeats the number of the last one that had any.
        """
        node = self._nodes.get(name)
        if node is None or node.epoch != epoch:
            return False
        if node.known and sequence <= node.sequence:
            return True
        if not node.known or not changes or sequence != node.sequence + 1:
            return False
        for pool, (added, removed) in changes.items():
            node.pools.setdefault(pool, Holdings()).apply(added, removed)
        node.sequence = sequence
        return True

    def drop(self, name: str) -> None:
        """Forget a node and its rows."""
        self._nodes.pop(name, None)

    def expire(self, now: float) -> list[str]:
        """Forget the nodes that have been silent too long; returns them."""
        silent = [name for name, node in self._nodes.items() if node.heard + self.silent_s < now]
        self._over = {life: since for life, since in self._over.items() if since + _OVER_S >= now}
        for name in silent:
            self._over[name, self._nodes.pop(name).epoch] = now
        return silent

    def locate(self, pool: str, keys: U8) -> dict[str, Mask]:
        """Node → per key whether it probably holds it; nodes that hold none are left out."""
        numbers = prefixes(keys)
        found = {name: node.pools[pool].contains(numbers) for name, node in self._nodes.items() if pool in node.pools}
        return {name: mask for name, mask in found.items() if mask.any()}


def divide(masks: Mapping[str, Mask], count: int) -> dict[str, NDArray[np.int64]]:
    """Which of `count` keys to ask of which node: whoever holds most of what is still open comes next, ties by name."""
    still = np.ones(count, np.bool_)
    shares: dict[str, NDArray[np.int64]] = {}
    left = dict(masks)
    while left:
        name = min(left, key=lambda node: (-int((left[node] & still).sum()), node))
        take = left.pop(name) & still
        if not take.any():
            break
        shares[name] = np.flatnonzero(take)
        still &= ~take
    return shares


def merge(changes: Iterable[tuple[U64, bool]]) -> tuple[U64, U64]:
    """(added, removed) of a series of changes in order; the last one of each number counts."""
    last: dict[int, bool] = {}
    for numbers, there in changes:
        last.update(dict.fromkeys(numbers.tolist(), there))
    added = np.array([number for number, there in last.items() if there], np.uint64)
    removed = np.array([number for number, there in last.items() if not there], np.uint64)
    return added, removed
