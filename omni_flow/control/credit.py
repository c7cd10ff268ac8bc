"""Creators' credit: how many numbers a creator has open under one parent.

A number is open from its creation until each reader that is waited for has acknowledged it. Acks may come twice and,
after a share was hosted anew, before the number is created again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from omni_flow.control.plan import Plan

Reader = tuple[int, int]
"""Who acknowledged: (interface, share), or (GATEWAY, output)."""

UNBOUNDED: Final = 1 << 60


class Account:
    """The open numbers of one source under one parent.

    `limit` is W in numbers, `byte_limit` W in bytes; `floor` numbers may always be open, however large, for a window
    must be able to fill. `expected` is how many distinct acknowledgements close a number; 0: nobody is waited for.
    """

    __slots__ = ("_byte_limit", "_early", "_expected", "_floor", "_limit", "_open", "_sizes", "created", "open_bytes")

    def __init__(self, limit: int, expected: int, byte_limit: int = UNBOUNDED, floor: int = 1) -> None:
        self._limit = limit
        self._floor = floor
        self._byte_limit = byte_limit
        self._expected = expected
        self._open: dict[int, set[Reader] | None] = {}
        self._early: dict[int, set[Reader]] = {}
        self._sizes: dict[int, int] = {}
        self.created = 0
        self.open_bytes = 0

    @property
    def open(self) -> int:
        """How many numbers are open."""
        return len(self._open)

    def may_create(self) -> bool:
        """Whether the next number may be created now."""
        held = len(self._open)
        return held < self._floor or (held < self._limit and self.open_bytes < self._byte_limit)

    def create(self, size: int = 0) -> int:
        """Create the next number, with `size` bytes of payload; returns it."""
        number = self.created
        self.created = number + 1
        if self._expected == 0:
            return number
        early = self._early.pop(number, None) if self._early else None
        if early is not None and len(early) >= self._expected:
            return number
        self._open[number] = early
        if size:
            self._sizes[number] = size
            self.open_bytes += size
        return number

    def ack(self, number: int, reader: Reader) -> bool:
        """Take an acknowledgement. True if it closed an open number."""
        if number >= self.created:
            self._early.setdefault(number, set()).add(reader)
            return False
        if number not in self._open:
            return False
        if self._expected > 1:
            seen = self._open[number]
            if seen is None:
                seen = self._open[number] = set()
            seen.add(reader)
            if len(seen) < self._expected:
                return False
        del self._open[number]
        if self._sizes:
            self.open_bytes -= self._sizes.pop(number, 0)
        return True


def account_for(plan: Plan, source_id: int, shares: Sequence[int], credit: int, credit_bytes: int) -> Account:
    """A fresh account of a source: W raised so that windows can fill, acks expected from each reader waited for."""
    source = plan.sources[source_id]
    expected = sum(shares[r.role] if r.everyone else 1 for r in source.readers)
    return Account(max(credit, source.at_least), expected, credit_bytes, source.at_least)
