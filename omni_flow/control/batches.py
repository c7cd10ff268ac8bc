"""What a batch is, without clock and task: who waits, who goes together, and what a call that raised comes to. Pure.

Items are independent of each other, so with whom an item shared its batch never shows: a call that raises is made again
for each item alone, and only items that raise alone fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
Arguments = Mapping[str, Any]


class Waiting(Generic[T]):
    """Items that wait for a call, `most` of them at most."""

    __slots__ = ("_items", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: list[T] = []

    def add(self, item: T) -> bool:
        """Let `item` wait. True if the call should be made now: nobody else may join it."""
        self._items.append(item)
        return len(self._items) >= self._most

    def take(self) -> list[T]:
        """Those who wait, for their call; then nobody does."""
        items, self._items = self._items, []
        return items


def alike(items: Iterable[tuple[T, Arguments]]) -> list[list[tuple[T, Arguments]]]:
    """The calls that `items` need: one for those with the same parameters (an optional one may be absent)."""
    calls: dict[frozenset[str], list[tuple[T, Arguments]]] = {}
    for item, arguments in items:
        calls.setdefault(frozenset(arguments), []).append((item, arguments))
    return list(calls.values())


class Answer(NamedTuple, Generic[T]):
    """What a call came to: the results of items, what an item raised, and the calls to make next."""

    said: list[tuple[T, Any]]
    raised: list[tuple[T, BaseException]]
    again: list[Sequence[T]]


def answered(items: Sequence[T], answer: Sequence[Any] | BaseException) -> Answer[T]:
    """What a call for `items` came to. `answer`: a result for each, in their order, or what the call raised."""
    if not isinstance(answer, BaseException):
        return Answer(list(zip(items, answer, strict=True)), [], [])
    if len(items) == 1:
        return Answer([], [(items[0], answer)], [])
    return Answer([], [], [[item] for item in items])
