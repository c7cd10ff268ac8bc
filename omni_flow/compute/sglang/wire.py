"""Messages between a role's process and its engine process: length-prefixed msgpack on a stream socket pair.

Arrays travel as raw bytes. Nothing is pickled.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from omni_flow.compute.errors import ComputeError
from omni_flow.compute.sampling import Sampling

_HEAD: Final = struct.Struct("<I")
MAX_FRAME: Final = 1 << 30


class Media(msgspec.Struct, array_like=True):
    """Rows of one embedding span: float32 (length, hidden size) in C order."""

    start: int
    length: int
    digest: bytes
    rows: bytes


class Generate(msgspec.Struct, array_like=True, tag="g"):
    """Start a request. `ids` is int64 in native order."""

    number: int
    ids: bytes
    media: list[Media]
    sampling: Sampling
    tenant: bytes
    logits: bool
    hidden: bool
    prompt_logprobs: bool
    priority: int
    steps: dict[str, Any] | None = None
    session: str = ""
    timeline: bool = False
    stream: bool = True


class Cancel(msgspec.Struct, array_like=True, tag="c"):
    number: int


class EndSession(msgspec.Struct, array_like=True, tag="es"):
    session: str


class AskStats(msgspec.Struct, array_like=True, tag="s"):
    number: int


class Shutdown(msgspec.Struct, array_like=True, tag="q"):
    """End the engine process."""


class FixedOpen(msgspec.Struct, array_like=True, tag="fo"):
    """Open a fixed-row session of `rows` rows behind a context; `at`: where they lie in memory (`SharedRows`)."""

    number: int
    ids: bytes
    media: list[Media]
    rows: int
    placeholder: int
    tenant: bytes
    at: int


class FixedStep(msgspec.Struct, array_like=True, tag="fs"):
    """One forward over the rows in memory; one byte per row, 1 where it is causal, or none."""

    number: int
    causal: bytes


class FixedClose(msgspec.Struct, array_like=True, tag="fc"):
    number: int


class FixedOpened(msgspec.Struct, array_like=True, tag="fp"):
    """`cached`: tokens of the context that need not be computed."""

    number: int
    cached: int


class FixedOut(msgspec.Struct, array_like=True, tag="fh"):
    """A step is done, and the hidden states of the rows are in memory."""

    number: int


class Ready(msgspec.Struct, array_like=True, tag="r"):
    """The engine serves. Sizes in tokens. `tokenizer`: whether the checkpoint has one; `warnings`: lines that were
    logged while it started."""

    max_tokens: int
    max_prompt: int
    vocabulary: int
    hidden: int
    page_size: int
    tokenizer: bool
    warnings: list[str] = []


class Step(msgspec.Struct, array_like=True, tag="t"):
    """New tokens of one request; the parallel lists are empty where not asked for."""

    number: int
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    logits: list[bytes]
    hidden: list[bytes]
    emitted: list[bytes | None] = []


class End(msgspec.Struct, array_like=True, tag="e"):
    number: int
    reason: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    prompt_logprobs: list[float]
    hits: tuple[int, int, int]
    marks: list[tuple[int, bytes]]
    timeline: list[tuple[str, int]] = []


class Refused(msgspec.Struct, array_like=True, tag="x"):
    """The request ended with an error. `kind` is the name of a class in `omni_flow.compute.errors`."""

    number: int
    kind: str
    message: str
    mend: str

    @classmethod
    def of(cls, number: int, error: ComputeError) -> Refused:
        return cls(number, type(error).__name__, error.message, error.mend)


class Stats(msgspec.Struct, array_like=True, tag="n"):
    number: int
    counts: dict[str, int]


ToEngine = Generate | Cancel | EndSession | AskStats | Shutdown | FixedOpen | FixedStep | FixedClose
FromEngine = Ready | Step | End | Refused | Stats | FixedOpened | FixedOut

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes of a message on the stream.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: it holds what can't be written, or is too long.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"{len(body)} bytes are more than a message holds, {MAX_FRAME}")
    return _HEAD.pack(len(body)) + body


class Frames:
    """Cuts a stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Add received bytes; yields the bodies that are complete now."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield body


class Inlet:
    """The engine's end of the socket: what has arrived, without waiting.

    Args:
        rows: descriptor of the memory that the role shares for fixed rows (`shared_rows.RowsFile`); -1: none.
    """

    def __init__(self, sock: socket.socket, rows: int = -1) -> None:
        self.sock = sock
        self.rows = rows
        self._frames = Frames()
        self.closed = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def poll(self) -> list[Any]:
        """All whole messages that are there; sets `closed` when the other end is gone."""
        found: list[Any] = []
        while not self.closed:
            try:
                data = self.sock.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
                break
            found += [to_engine.decode(body) for body in self._frames.feed(data)]
        return found

    def send(self, *messages: FromEngine) -> None:
        """Send whole, waiting for room: the role reads all the time."""
        try:
            self.sock.sendall(b"".join(frame(message) for message in messages))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
