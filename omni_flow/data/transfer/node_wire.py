"""What the transfer processes of two nodes say to each other over ZMQ (DEALER to ROUTER).

Frames: request id (8 bytes; 0: no answer wanted), msgpack body. Arrays travel as their bytes, little-endian.
"""

from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import BadMessage, DataError, from_code
from omni_flow.data.protocol import MAX_BATCH
from omni_flow.data.transfer.base import Endpoint

PROTOCOL: Final = 1


class Meet(msgspec.Struct, tag=True, frozen=True):
    """First words. `vector` is the handshake vector of identity: builds that hash differently do not talk."""

    protocol: int
    node: str
    epoch: int
    address: str
    vector: bytes


class Met(msgspec.Struct, tag=True, frozen=True):
    """The answer: who one is, and at which addresses the nodes one knows are."""

    node: str
    epoch: int
    peers: tuple[str, ...]


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Sign of life, with what has changed since the beat before: pool → (added, removed) prefixes."""

    node: str
    epoch: int
    sequence: int
    changes: dict[str, tuple[bytes, bytes]]


class AskRows(msgspec.Struct, tag=True, frozen=True):
    """All prefixes, please: an earlier beat is missing."""


class Rows(msgspec.Struct, tag=True, frozen=True):
    epoch: int
    sequence: int
    pools: dict[str, bytes]


class Pin(msgspec.Struct, tag=True, frozen=True):
    """Pin what is there of `keys`, for `hold_ms` at most, or until Unpin or the asker's end."""

    node: str
    epoch: int
    pool: str
    page_bytes: int
    keys: bytes
    hold_ms: int


class Pinned(msgspec.Struct, tag=True, frozen=True):
    """Columns over the keys that are there: u32 position among those asked for, u8 arena number, u32 slot, u64 xxh3 of
    the page. `lease` is 0 when there are none."""

    lease: int
    endpoint: Endpoint
    positions: bytes
    arenas: bytes
    slots: bytes
    checksums: bytes


class Unpin(msgspec.Struct, tag=True, frozen=True):
    lease: int


class Unpinned(msgspec.Struct, tag=True, frozen=True):
    """`held`: the pages were pinned all the time, so that what was read of them is whole."""

    held: bool


class Take(msgspec.Struct, tag=True, frozen=True):
    """A push: pull these from `node`."""

    node: str
    pool: str
    keys: bytes
    timeout_ms: int


class Taken(msgspec.Struct, tag=True, frozen=True):
    """One u8 per key."""

    ok: bytes


class Sorry(msgspec.Struct, tag=True, frozen=True):
    """A request that failed."""

    code: str
    message: str
    mend: str

    def error(self) -> DataError:
        return from_code(self.code, self.message, self.mend)


Said = Meet | Met | Beat | AskRows | Rows | Pin | Pinned | Unpin | Unpinned | Take | Taken | Sorry

encode = msgspec.msgpack.Encoder().encode
decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def column(data: bytes, dtype: str) -> NDArray[Any]:
    """The numbers in `data`. Raises: BadMessage when it is not a whole number of them."""
    if len(data) % np.dtype(dtype).itemsize:
        raise BadMessage(f"{len(data)} bytes are no column of {dtype}")
    return np.frombuffer(data, dtype)


def keys_of(data: bytes) -> NDArray[np.uint8]:
    """Rows of 32 bytes. Raises: BadMessage when it is not 1 to MAX_BATCH of them."""
    if not data or len(data) % 32 or len(data) > 32 * MAX_BATCH:
        raise BadMessage(f"{len(data)} bytes of keys", f"1 to {MAX_BATCH} keys of 32 bytes")
    return np.frombuffer(data, np.uint8).reshape(-1, 32)
