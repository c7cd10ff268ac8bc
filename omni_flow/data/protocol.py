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

from omni_flow.data.errors import BadArgument, BadMessage, DataError, Holder, from_code

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
HEADER_1: Final = struct.Struct("<BBBBIQIIBBHI")

_KEY: Final = 6
_DTYPES: Final[tuple[np.dtype[Any], ...]] = (
    np.dtype("u1"),
    np.dtype("<u2"),
    np.dtype("<u4"),
    np.dtype("<u8"),
    np.dtype("<i8"),
    np.dtype("<f8"),
)
_NUMS: Final = {dtype.num: code for code, dtype in enumerate(_DTYPES)}
_ITEM: Final = tuple(dtype.itemsize for dtype in _DTYPES) + (KEY_BYTES,)
_ENCODE: Final = msgspec.msgpack.Encoder().encode
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
    FDS_NEXT: Final = 0x06
    RESERVE: Final = 0x10
    COMMIT: Final = 0x11
    ABORT: Final = 0x12
    LOOKUP: Final = 0x13
    UNPIN: Final = 0x14
    PROBE: Final = 0x15
    DROP: Final = 0x16
    HINT: Final = 0x17
    S_KEEP: Final = 0x18
    S_END: Final = 0x19
    S_TIERS: Final = 0x1A
    T_LEASE: Final = 0x30
    T_FLUSH: Final = 0x31
    T_RETURN: Final = 0x32
    T_RETRACT: Final = 0x33
    T_SETTLE: Final = 0x34
    T_RENEW: Final = 0x35
    T_TRIM: Final = 0x36
    JOB: Final = 0x40
    JOB_DONE: Final = 0x41
    JOB_ADD: Final = 0x42
    JOB_CANCEL: Final = 0x43
    L3_CHANGE: Final = 0x44
    TIER_STATE: Final = 0x45
    STATS: Final = 0x70
    INSPECT: Final = 0x71
    CHECK: Final = 0x72
    OVERVIEW: Final = 0x73


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
    """A decoded message, read where it lies.

    Body and columns are views of the buffer it came in until the next message comes in there; `own` makes them its own.
    """

    __slots__ = ("_buffer", "_columns", "_raw", "_specs", "epoch", "fds", "flags", "op", "request")

    def __init__(
        self,
        op: int,
        flags: int,
        request: int,
        epoch: int,
        buffer: bytes | bytearray | memoryview,
        raw: tuple[int, int],
        specs: Sequence[tuple[int, int, int]],
        fds: Sequence[int] = (),
    ) -> None:
        self.op = op
        self.flags = flags
        self.request = request
        self.epoch = epoch
        self.fds = fds
        self._buffer = buffer
        self._raw = raw
        self._specs = specs
        self._columns: list[Column] | None = None

    @property
    def columns(self) -> list[Column]:
        """The columns as arrays; keys have shape (n, 32)."""
        columns = self._columns
        if columns is None:
            columns = self._columns = []
            for code, count, at in self._specs:
                if code == _KEY:
                    flat = np.frombuffer(self._buffer, np.uint8, count * KEY_BYTES, at)
                    columns.append(flat.reshape(count, KEY_BYTES))
                else:
                    columns.append(np.frombuffer(self._buffer, _DTYPES[code], count, at))
        return columns

    def one_key(self) -> bytes | None:
        """The key if the message has one column with one key: without an array."""
        specs = self._specs
        if len(specs) == 1 and specs[0][0] == _KEY and specs[0][1] == 1:
            at = specs[0][2]
            return bytes(self._buffer[at : at + KEY_BYTES])
        return None

    def take_fds(self) -> list[int]:
        """The descriptors that came along; from now on the caller's to close. The server closes those nobody takes."""
        taken, self.fds = list(self.fds), ()
        return taken

    def own(self) -> Message:
        """The same message with memory of its own."""
        end = max((at + count * _ITEM[code] for code, count, at in self._specs), default=self._raw[1])
        copy = bytes(self._buffer[: max(end, self._raw[1])])
        return Message(self.op, self.flags, self.request, self.epoch, copy, self._raw, self._specs, self.fds)

    def body(self, kind: type[Body]) -> Body:
        """Decode and validate the body.

        Raises:
            BadMessage: it is not a `kind`.
        """
        start, end = self._raw
        try:
            return msgspec.msgpack.decode(self._buffer[start:end], type=kind)
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


def _packed(column: Column | bytes) -> tuple[int, int, bytes]:
    """Type code, rows and bytes of a column.

    Raises:
        BadMessage: a type or shape the protocol does not know.
    """
    if isinstance(column, bytes):
        return 0, len(column), column
    kind = column.dtype
    if column.ndim == 2 and column.shape[1] == KEY_BYTES and kind.itemsize == 1:
        return _KEY, len(column), column.tobytes()
    code = _NUMS.get(kind.num, -1) if column.ndim == 1 and kind.isnative else -1
    if code < 0:
        raise BadMessage(f"column of {kind} with shape {column.shape}", "use u1, u2, u4, u8, i8, f8 or keys")
    return code, len(column), column.tobytes()


def encode(
    op: int,
    flags: int,
    request: int,
    epoch: int,
    body: msgspec.Struct | None = None,
    columns: Sequence[Column | bytes] = (),
) -> bytes:
    """One message as bytes. A column may be given as bytes: u8.

    Raises:
        BadMessage: longer than `MAX_MESSAGE`, or a column of a type the protocol does not know.
    """
    raw = b"" if body is None else _ENCODE(body)
    size = len(raw)
    if not columns:
        message = HEADER.pack(VERSION, op, flags, 0, request, epoch, size, 24 + size) + raw
    elif len(columns) == 1:
        code, rows, data = _packed(columns[0])
        long = len(data)
        total = 32 + ((size + 7) & ~7) + ((long + 7) & ~7)
        head = HEADER_1.pack(VERSION, op, flags, 1, request, epoch, size, total, code, 0, 0, rows)
        message = head + raw + _PAD[-size & 7] + data + _PAD[-long & 7]
    else:
        heads: list[bytes] = [b""]
        parts: list[bytes] = [raw, _PAD[-size & 7]]
        total = 24 + 8 * len(columns) + ((size + 7) & ~7)
        for column in columns:
            code, rows, data = _packed(column)
            heads.append(COLUMN.pack(code, 0, 0, rows))
            parts.append(data)
            parts.append(_PAD[-len(data) & 7])
            total += (len(data) + 7) & ~7
        heads[0] = HEADER.pack(VERSION, op, flags, len(columns), request, epoch, size, total)
        message = b"".join(heads + parts)
    if len(message) > MAX_MESSAGE:
        raise BadMessage(f"message of {len(message)} bytes", f"split it, the limit is {MAX_MESSAGE}")
    return message


def decode(buffer: bytes | bytearray | memoryview, length: int, fds: Sequence[int] = ()) -> Message:
    """Read the first `length` bytes of `buffer` as one message.

    Raises:
        BadMessage: anything that is not exactly one well-formed message.
    """
    if length < 24:
        raise BadMessage(f"message of {length} bytes", "a header has 24")
    version, op, flags, ncols, request, epoch, body_length, total = HEADER.unpack_from(buffer)
    if version != VERSION or total != length or ncols > MAX_COLUMNS:
        raise BadMessage(
            f"message of {length} bytes, version {version}, says {total} bytes and {ncols} columns",
            f"this side speaks version {VERSION} with at most {MAX_COLUMNS} columns",
        )
    start = 24 + 8 * ncols
    end = start + body_length
    if not ncols:
        if end != total:
            raise BadMessage(f"body of {body_length} bytes in a message of {total}")
        return Message(op, flags, request, epoch, buffer, (start, end), (), fds)
    place = end + (-body_length & 7)
    if place > total:
        raise BadMessage(f"body of {body_length} bytes in a message of {total}")
    specs: list[tuple[int, int, int]] = []
    for at in range(24, start, 8):
        code, zero, zeros, count = COLUMN.unpack_from(buffer, at)
        if code > _KEY or zero or zeros:
            raise BadMessage(f"column {len(specs)} has type {code}")
        specs.append((code, count, place))
        place += (count * _ITEM[code] + 7) & ~7
    if place != total:
        raise BadMessage(f"message of {total} bytes holds {place}")
    return Message(op, flags, request, epoch, buffer, (start, end), specs, fds)


def peek(buffer: bytes | bytearray | memoryview, length: int) -> tuple[int, int]:
    """Op and request id of a message that may be malformed otherwise; (0, 0) if even those are missing."""
    if length < 24:
        return 0, 0
    head = HEADER.unpack_from(buffer, 0)
    return int(head[1]), int(head[4])


def keys_array(keys: Sequence[bytes] | Column) -> Column:
    """Keys as an (n, 32) array of u8.

    Raises:
        BadArgument: they are no keys, or one is not 32 bytes long.
    """
    if isinstance(keys, np.ndarray):
        if keys.ndim != 2 or keys.shape[1] != KEY_BYTES or keys.itemsize != 1:
            raise BadArgument(f"keys of shape {keys.shape} and type {keys.dtype}", "give an array (n, 32) of type u1")
        return keys
    try:
        raw = b"".join(keys)
        count = len(keys)
    except TypeError as error:
        raise BadArgument(f"keys: {error}", "give a list of bytes, or an array (n, 32) of type u1") from error
    if len(raw) != KEY_BYTES * count:
        raise BadArgument("keys: one is not 32 bytes long", "keys are SHA-256 digests")
    return np.frombuffer(raw, np.uint8).reshape(-1, KEY_BYTES)
