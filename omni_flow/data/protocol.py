"""Messages of the memory manager: a fixed header, a msgspec body, raw numpy columns.

The layout stands in `docs/data_plane.md`. Encoding and decoding copy nothing on the way in: columns are views of the
receive buffer, valid until the next receive on the same buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import BadMessage, DataError, Holder, from_code

VERSION: Final = 1
MAX_MESSAGE: Final = 160 * 1024
MAX_BATCH: Final = 4096
KEY_BYTES: Final = 32
MAX_COLUMNS: Final = 64

REPLY: Final = 1
ERROR: Final = 2
EVENT: Final = 4
FDS: Final = 8

HEADER: Final = struct.Struct("<BBBBIQII")
COLUMN: Final = struct.Struct("<BBHI")

_KEY: Final = 6
_DTYPES: Final[tuple[np.dtype[Any], ...]] = (
    np.dtype("u1"),
    np.dtype("<u2"),
    np.dtype("<u4"),
    np.dtype("<u8"),
    np.dtype("<i8"),
    np.dtype("<f8"),
)
_CODES: Final = {dtype.str: code for code, dtype in enumerate(_DTYPES)}
_ITEM: Final = tuple(dtype.itemsize for dtype in _DTYPES) + (KEY_BYTES,)
_PAD: Final = tuple(bytes(n) for n in range(8))

Column = NDArray[Any]
Body = TypeVar("Body", bound=msgspec.Struct)


class Op:
    """Operation numbers; ranges in `docs/data_plane.md`."""

    HELLO: Final = 0x01
    ARENA: Final = 0x02
    PING: Final = 0x03
    KEEPALIVE: Final = 0x04
    GOODBYE: Final = 0x05
    RESERVE: Final = 0x10
    COMMIT: Final = 0x11
    ABORT: Final = 0x12
    LOOKUP: Final = 0x13
    UNPIN: Final = 0x14
    PROBE: Final = 0x15
    DROP: Final = 0x16
    HINT: Final = 0x17
    T_LEASE: Final = 0x30
    T_FLUSH: Final = 0x31
    T_RETURN: Final = 0x32
    T_RETRACT: Final = 0x33
    JOB: Final = 0x40
    JOB_DONE: Final = 0x41
    JOB_ADD: Final = 0x42
    JOB_CANCEL: Final = 0x43
    L3_CHANGE: Final = 0x44
    TIER_STATE: Final = 0x45
    STATS: Final = 0x70
    INSPECT: Final = 0x71
    CHECK: Final = 0x72


OP_NAMES: Final[dict[int, str]] = {number: name.lower() for name, number in vars(Op).items() if isinstance(number, int)}


class Failure(msgspec.Struct, array_like=True):
    """Body of an error reply."""

    code: str
    message: str
    mend: str = ""
    holders: tuple[Holder, ...] = ()

    def error(self) -> DataError:
        return from_code(self.code, self.message, self.mend, self.holders)


class Message:
    """A decoded message. `columns` are views; `raw` is the undecoded body."""

    __slots__ = ("columns", "epoch", "fds", "flags", "op", "raw", "request")

    def __init__(
        self,
        op: int,
        flags: int,
        request: int,
        epoch: int,
        raw: bytes | memoryview,
        columns: list[Column],
        fds: Sequence[int] = (),
    ) -> None:
        self.op = op
        self.flags = flags
        self.request = request
        self.epoch = epoch
        self.raw = raw
        self.columns = columns
        self.fds = fds

    def take_fds(self) -> list[int]:
        """The descriptors that came along; from now on the caller's to close. The server closes those nobody takes."""
        taken, self.fds = list(self.fds), ()
        return taken

    def own(self) -> Message:
        """The same message with memory of its own."""
        columns = [column.copy() for column in self.columns]
        return Message(self.op, self.flags, self.request, self.epoch, bytes(self.raw), columns, self.fds)

    def body(self, kind: type[Body]) -> Body:
        """Decode and validate the body.

        Raises:
            BadMessage: it is not a `kind`.
        """
        try:
            return msgspec.msgpack.decode(self.raw, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadMessage(f"body of {OP_NAMES.get(self.op, self.op)} is no {kind.__name__}: {error}") from error

    def column(self, at: int, dtype: str, count: int | None = None) -> Column:
        """The column `at`, checked for type (`"key"` or a numpy type string) and length.

        Raises:
            BadMessage: missing, of another type, or of another length.
        """
        if at >= len(self.columns):
            raise BadMessage(f"{OP_NAMES.get(self.op, self.op)} lacks column {at} ({dtype})")
        column = self.columns[at]
        if dtype == "key":
            if column.ndim != 2:
                raise BadMessage(f"column {at} of {OP_NAMES.get(self.op, self.op)} holds no keys")
        elif column.ndim != 1 or column.dtype.str != np.dtype(dtype).str:
            raise BadMessage(f"column {at} of {OP_NAMES.get(self.op, self.op)} is {column.dtype}, not {dtype}")
        if count is not None and len(column) != count:
            raise BadMessage(f"column {at} of {OP_NAMES.get(self.op, self.op)} has {len(column)} rows, not {count}")
        return column


def encode(
    op: int,
    flags: int,
    request: int,
    epoch: int,
    body: msgspec.Struct | None = None,
    columns: Sequence[Column] = (),
) -> bytes:
    """One message as bytes.

    Raises:
        BadMessage: longer than `MAX_MESSAGE`, or a column of a type the protocol does not know.
    """
    raw = b"" if body is None else msgspec.msgpack.encode(body)
    if not columns:
        total = 24 + len(raw)
        if total > MAX_MESSAGE:
            raise BadMessage(f"message of {total} bytes", f"split it, the limit is {MAX_MESSAGE}")
        return HEADER.pack(VERSION, op, flags, 0, request, epoch, len(raw), total) + raw
    heads: list[bytes] = [b""]
    parts: list[bytes] = [raw, _PAD[-len(raw) & 7]]
    total = 24 + 8 * len(columns) + len(raw) + (-len(raw) & 7)
    for column in columns:
        if column.ndim == 2 and column.shape[1] == KEY_BYTES and column.itemsize == 1:
            code = _KEY
        else:
            code = _CODES.get(column.dtype.str, -1) if column.ndim == 1 else -1
            if code < 0:
                raise BadMessage(f"column of {column.dtype} with shape {column.shape}", "use u1..u8, i8, f8 or keys")
        data = column.tobytes()
        heads.append(COLUMN.pack(code, 0, 0, len(column)))
        parts.append(data)
        if len(data) & 7:
            parts.append(_PAD[-len(data) & 7])
        total += (len(data) + 7) & ~7
    if total > MAX_MESSAGE:
        raise BadMessage(f"message of {total} bytes", f"split it, the limit is {MAX_MESSAGE}")
    heads[0] = HEADER.pack(VERSION, op, flags, len(columns), request, epoch, len(raw), total)
    return b"".join(heads + parts)


def decode(buffer: bytes | bytearray | memoryview, length: int, fds: Sequence[int] = ()) -> Message:
    """Read the first `length` bytes of `buffer` as one message.

    Raises:
        BadMessage: anything that is not exactly one well-formed message.
    """
    if length < 24:
        raise BadMessage(f"message of {length} bytes", "a header has 24")
    version, op, flags, ncols, request, epoch, body_length, total = HEADER.unpack_from(buffer, 0)
    if version != VERSION:
        raise BadMessage(f"protocol version {version}", f"this side speaks {VERSION}")
    if total != length:
        raise BadMessage(f"message of {length} bytes says {total}")
    view = memoryview(buffer)
    if not ncols:
        if 24 + body_length != total:
            raise BadMessage(f"body of {body_length} bytes in a message of {total}")
        return Message(op, flags, request, epoch, view[24:total], [], fds)
    if ncols > MAX_COLUMNS:
        raise BadMessage(f"{ncols} columns", f"at most {MAX_COLUMNS}")
    at = 24 + 8 * ncols
    end = at + body_length
    if end > total:
        raise BadMessage(f"body of {body_length} bytes in a message of {total}")
    raw = view[at:end]
    place = end + (-body_length & 7)
    columns: list[Column] = []
    for i in range(ncols):
        code, zero, zeros, count = COLUMN.unpack_from(buffer, 24 + 8 * i)
        if code > _KEY or zero or zeros:
            raise BadMessage(f"column {i} has type {code}")
        size = count * _ITEM[code]
        if place + size > total:
            raise BadMessage(f"column {i} of {size} bytes passes the end of the message")
        if code == _KEY:
            columns.append(np.frombuffer(view, np.uint8, size, place).reshape(count, KEY_BYTES))
        else:
            columns.append(np.frombuffer(view, _DTYPES[code], count, place))
        place += (size + 7) & ~7
    if place != total:
        raise BadMessage(f"message of {total} bytes holds {place}")
    return Message(op, flags, request, epoch, raw, columns, fds)


def peek(buffer: bytes | bytearray | memoryview, length: int) -> tuple[int, int]:
    """Op and request id of a message that may be malformed otherwise; (0, 0) if even those are missing."""
    if length < 24:
        return 0, 0
    head = HEADER.unpack_from(buffer, 0)
    return int(head[1]), int(head[4])


def keys_array(keys: Sequence[bytes] | Column) -> Column:
    """Keys as an (n, 32) array of u8.

    Raises:
        BadMessage: a key that is not 32 bytes long.
    """
    if isinstance(keys, np.ndarray):
        if keys.ndim != 2 or keys.shape[1] != KEY_BYTES or keys.itemsize != 1:
            raise BadMessage(f"keys of shape {keys.shape}", "give an array of shape (n, 32) and type u1")
        return keys
    raw = b"".join(keys)
    if len(raw) != KEY_BYTES * len(keys):
        raise BadMessage("a key that is not 32 bytes long", "keys are SHA-256 digests")
    return np.frombuffer(raw, np.uint8).reshape(-1, KEY_BYTES)
