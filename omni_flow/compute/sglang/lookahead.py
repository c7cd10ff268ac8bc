"""What the source of pages is known not to have.

A request that finds nothing new in the pool would wait for the memory manager to hear so. Instead the pages that the
coming look-ups would ask for first are probed together, when requests arrive, and the answer is there when SGLang forms
a batch; where all pages of a request are probed anyway, for lower tiers, that answer serves here too. It holds for that
batch: a page that another engine publishes later is found by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import islice
from typing import Any, Final

from omni_flow.compute.sglang.pages import PageBook
from omni_flow.data.identity import PageHash

WIDTH: Final = 32
"""Waiting requests looked at, from the front of the queue."""


class Lookahead:
    """See the module.

    Args:
        keys_of: page keys of a waiting request of SGLang's, as far as a match may go.
    """

    def __init__(self, book: PageBook, keys_of: Callable[[Any], Sequence[PageHash]]) -> None:
        self._book = book
        self._keys_of = keys_of
        self._absent: set[PageHash] = set()
        self._asked: list[tuple[set[PageHash], Callable[[], set[PageHash]]]] = []
        self._batch = -1

    def ask(self, chains: Iterable[Sequence[PageHash]], batch: int) -> None:
        """Probe what look-ups of these keys would ask for first, for the batch of this number."""
        self._begin(batch)
        firsts = {first for keys in chains if (first := self._book.first_unpinned(keys)) is not None}
        if firsts:
            self._asked.append((firsts, self._book.source.absent(list(firsts))))

    def ask_for(self, waiting: Iterable[Any], batch: int) -> None:
        """The same for requests that wait."""
        self.ask(map(self._keys_of, islice(waiting, WIDTH)), batch)

    def learn(self, keys: Sequence[PageHash], absent: Set[PageHash], batch: int) -> None:
        """The same of one chain, whose keys were probed otherwise: those are absent."""
        self._begin(batch)
        first = self._book.first_unpinned(keys)
        if first is not None:
            self._asked.append(({first}, lambda: {first} & absent))

    def _begin(self, batch: int) -> None:
        if batch != self._batch:
            self._batch = batch
            self._absent = set()
            self._asked = []

    def forget(self) -> None:
        """Pages have come that were not there."""
        self._batch = -1

    def absent(self, waiting: Sequence[Any], batch: int) -> Set[PageHash]:
        """Keys that the source does not have, while SGLang forms the batch of this number of those that wait."""
        if batch != self._batch:
            if len(waiting) < 2:
                return frozenset()
            self.ask_for(waiting, batch)
        for firsts, answer in self._asked:
            self._absent -= firsts  # what was asked of them before is older
            self._absent |= answer()
        self._asked = []
        return self._absent
