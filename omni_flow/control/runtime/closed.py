"""Closed requests of one gateway: one bit each, until the gateway's oldest live number passes it. Pure."""

from __future__ import annotations


class ClosedRequests:
    """Numbers below `oldest` are closed; above it, those in a set.

    A message of a closed request must never open a bucket again, however late it comes.
    """

    __slots__ = ("_closed", "oldest")

    def __init__(self) -> None:
        self.oldest = 0
        self._closed: set[int] = set()

    def close(self, number: int) -> None:
        """The request is over."""
        if number >= self.oldest:
            self._closed.add(number)

    def advance(self, oldest: int) -> None:
        """The gateway's oldest live number; lower values than known are old news."""
        if oldest <= self.oldest:
            return
        self.oldest = oldest
        if len(self._closed) > 64 or not self._closed:
            self._closed = {n for n in self._closed if n >= oldest}

    def is_closed(self, number: int) -> bool:
        return number < self.oldest or number in self._closed

    def __len__(self) -> int:
        """Bits held."""
        return len(self._closed)
