"""Value types that cross layers: control, data, compute and serve all speak of these, none owns them.

Nothing here knows a graph, a socket or a tensor library.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Absent:
    """Type of `ABSENT`: what a role returns or gives for an output that has no value. `None` is a value."""

    __slots__ = ()
    _one: Absent | None = None

    def __new__(cls) -> Absent:
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    def __repr__(self) -> str:
        return "ABSENT"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()


class TensorRef(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """A tensor that lies in an arena of a memory manager instead of in the message.

    `node` names the manager's node, `arena` the arena there; `offset` and `nbytes` are bytes in it; `generation`
    is the slot's generation at publication (a reader that finds another one reads a slot given to somebody else).
    `dtype` is a numpy or ml_dtypes name, `shape` the shape in elements, C order.
    """

    node: str
    arena: int
    offset: int
    nbytes: int
    generation: int
    dtype: str
    shape: tuple[int, ...]


class KVRef(msgspec.Struct, frozen=True, array_like=True, tag="kv"):
    """A sequence's KV cache by identity: where it lies is the memory manager's business.

    `namespace` is the 32-byte digest of the KV namespace, `pages` the chained page hashes (32 bytes each) of the
    full pages, `tokens` the length of the sequence in tokens.
    """

    namespace: bytes
    pages: tuple[bytes, ...]
    tokens: int
