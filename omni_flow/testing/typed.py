"""Values of a given type for stand-ins and drawn inputs: window policies and tables get what they may expect."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from omni_flow.control.types import Audio, Bytes, Image, Json, ListOf, OneOf, Scalar, Tensor, Text, Tokens, Type

EXTENT = 3
"""Elements along a dimension that a type leaves open."""


class Array(np.ndarray[Any, Any]):
    """An array that compares, hashes and prints as one value, as the simulator needs it of every value."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, np.ndarray):
            return False
        mine, theirs = self.view(np.ndarray), other.view(np.ndarray)
        return mine.dtype == theirs.dtype and np.array_equal(mine, theirs)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.shape, self.tobytes()))

    def __repr__(self) -> str:
        return f"Array({self.dtype}, {self.tolist()})"


def value_for(type_: Type, draw: Random) -> Any:
    """A value of `type_`, or None if there is no way to make one (records, KV)."""
    if isinstance(type_, Text):
        return f"word{draw.randrange(1000)}{draw.choice(['', ' ', ', ', '. ', '? '])}"
    if isinstance(type_, Bytes):
        return draw.randbytes(draw.randrange(5))
    if isinstance(type_, Scalar):
        return {int: draw.randrange(8), float: draw.random(), bool: draw.random() < 0.5}.get(type_.kind)
    if isinstance(type_, Tokens):
        return [draw.randrange(32_000) for _ in range(draw.randrange(1, 4))]
    if isinstance(type_, ListOf):
        items = [value_for(type_.item, draw) for _ in range(draw.randrange(1, 4))]
        return None if None in items else items
    if isinstance(type_, OneOf):
        return value_for(draw.choice(type_.options), draw)
    if isinstance(type_, Json):
        return {"number": draw.randrange(1000)}
    return _array(type_, draw)


def _array(type_: Type, draw: Random) -> Array | None:
    if isinstance(type_, Audio):
        return _filled((EXTENT,), "float32", draw)
    if isinstance(type_, Image):
        return _filled((EXTENT, EXTENT, 3), "uint8", draw)
    if isinstance(type_, Tensor):
        shape = tuple(
            n if isinstance(n, int) else EXTENT for n in (type_.shape if type_.shape is not None else (None,))
        )
        return _filled(shape, type_.dtype or "float32", draw)
    return None


def _filled(shape: tuple[int, ...], dtype: str, draw: Random) -> Array:
    """An array full of one number; types that numpy does not know become float32."""
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = np.dtype("float32")
    number = draw.random() if known.kind in "fc" else draw.randrange(2 if known.kind == "b" else 100)
    return np.full(shape, number, known).view(Array)
