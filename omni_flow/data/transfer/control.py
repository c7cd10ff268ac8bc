"""What a `DriverHost` and its worker process say to each other: length-prefixed msgpack frames with descriptors.

A stream socket, so spans of any number pass; the worker ends when it closes.
"""

import array
import os
import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

from omni_flow.data.transfer.base import Access, ArenaId, Endpoint, Job, JobId, Outcome, Progress

_SIZE = struct.Struct("<I")
MAX_FRAME = 256 << 20
_MAX_FDS = 4


class Configure(msgspec.Struct, tag=True, frozen=True):
    """First frame: which driver, and its options as msgpack."""

    driver: str
    options: bytes


class Register(msgspec.Struct, tag=True, frozen=True):
    """Followed by one descriptor."""

    arena: ArenaId
    size: int
    access: Access


class Start(msgspec.Struct, tag=True, frozen=True):
    job: Job


class Cancel(msgspec.Struct, tag=True, frozen=True):
    job: JobId


class AskProgress(msgspec.Struct, tag=True, frozen=True):
    job: JobId


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Answer to Configure and Register."""

    endpoint: Endpoint


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Answer to Configure and Register when they cannot be done."""

    code: str
    text: str


class Report(msgspec.Struct, tag=True, frozen=True):
    """Answer to AskProgress."""

    progress: Progress | None


class Ended(msgspec.Struct, tag=True, frozen=True):
    """Unasked: a job is over."""

    outcome: Outcome


ToWorker = Configure | Register | Start | Cancel | AskProgress
FromWorker = Ready | Refused | Report | Ended

In = TypeVar("In")


class Channel(Generic[In]):
    """Frames over one stream socket. `send` may be called from several threads, `receive` from one at a time."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[In]) -> None:
        self.sock = sock
        self._decoder = decoder
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToWorker | FromWorker, fd: int | None = None) -> None:
        """Raises: OSError when the other side has ended."""
        with self._lock:
            body = self._encoder.encode(message)
            fds = array.array("i", [] if fd is None else [fd])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
            self.sock.sendmsg([_SIZE.pack(len(body))], rights)
            self.sock.sendall(body)

    def receive(self) -> tuple[In, list[int]] | None:
        """The next frame and the descriptors that came with it (the caller's to close), None at the end.

        Raises: ConnectionError when the frame is cut short or too long, msgspec.DecodeError when it is another kind.
        """
        head, fds, flags, _ = socket.recv_fds(self.sock, _SIZE.size, _MAX_FDS)
        if not head:
            return None
        if flags & socket.MSG_CTRUNC:
            raise ConnectionError("descriptors were lost; raise the limit of open files (RLIMIT_NOFILE)")
        head += self._exact(_SIZE.size - len(head))
        (size,) = _SIZE.unpack(head)
        if size > MAX_FRAME:
            raise ConnectionError(f"a control frame of {size} bytes is beyond {MAX_FRAME}")
        return self._decoder.decode(self._exact(size)), fds

    def _exact(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self.sock.recv_into(view)
            if not got:
                raise ConnectionResetError("the control connection ended within a frame")
            view = view[got:]
        return data


def close_all(fds: list[int]) -> None:
    """Close descriptors that came with a frame."""
    for fd in fds:
        os.close(fd)
