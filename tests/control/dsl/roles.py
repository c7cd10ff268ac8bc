"""Small role classes for the tests of the DSL and its lint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any


class One:
    """Methods of one value each, without annotations, so that types never come into play."""

    def take(self, x):
        return x

    def both(self, x, y):
        return x

    def maybe(self, x, y=None):
        return x

    def many(self, **inputs):
        return inputs

    def frames(self, x):
        yield x

    def two(self, x):
        return {"left": x, "right": x}


class Typed:
    """Methods with annotations."""

    def upper(self, text: str) -> str:
        return text.upper()

    def length(self, text: str) -> int:
        return len(text)

    def words(self, text: str) -> Iterator[str]:
        yield from text.split()

    async def tokens(self, ctx: Any, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word

    def join(self, words: list[str]) -> str:
        return " ".join(words)

    def batched(self, text: list[str]) -> list[str]:
        return text
