"""The process that owns the memory of one device where CUDA can't export it as a descriptor.

Memory that is shared by CUDA IPC belongs to the context that allocated it, and a context is what a memory manager does
not have: this process has one, allocates what the manager asks for and answers with handles. It ends with the manager's
socket, and all its memory with it. It is never started again: what clients have mapped would be of nobody.
`python -m omni_flow.data.cuda_owner FD DEVICE`, FD a SEQPACKET socket.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from omni_flow.data import cuda
from omni_flow.data.errors import BadMessage, DataError, SystemRefusal, from_code

COMMAND: Final = (sys.executable, "-m", "omni_flow.data.cuda_owner")
ANSWER_S: Final = 60.0
"""How long an answer may take, the first of which makes the context; who takes longer counts as ended."""
END_S: Final = 5.0
_RESEND_S: Final = 0.05
_MAX_MESSAGE: Final = 4096


class Allocate(msgspec.Struct, tag=True, frozen=True):
    nbytes: int


class Free(msgspec.Struct, tag=True, frozen=True):
    number: int


class Allocated(msgspec.Struct, tag=True, frozen=True):
    """`number`: by which it is given back; `handle`: by which other processes open it."""

    number: int
    handle: bytes


class Denied(msgspec.Struct, tag=True, frozen=True):
    """A `DataError` of the owner."""

    code: str
    message: str
    mend: str


Answered = Callable[[Allocated | DataError], None]


class Owner:
    """A running owner, as the manager sees it. It answers in order; nothing here waits for it but `allocate`.

    Args:
        device: the GPU.
        command: what runs it.
    """

    def __init__(self, device: int, command: Sequence[str] = COMMAND) -> None:
        self.device = device
        self._waiting: deque[tuple[float, Answered]] = deque()
        self._unsent: deque[bytes] = deque()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [*command, str(fd), str(device)], pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._sock.setblocking(False)

    def fileno(self) -> int:
        """Readable when an answer has come (`take` it), and when the owner has ended or was given up."""
        return self._sock.fileno()

    def request(self, nbytes: int, answered: Answered) -> None:
        """Ask for device memory of a multiple of `cuda.IPC_GRAIN` bytes. Told later, in `take`: what was allocated;
        OutOfMemory, the device does not have that much; SystemRefusal, the owner has ended, does not answer, or can't
        use the device."""
        self._waiting.append((time.monotonic() + ANSWER_S, answered))
        self._send(Allocate(nbytes))

    def take(self) -> bool:
        """Take in what has come; False once the owner has ended, which is told to all who wait."""
        while (raw := self._receive()) is not None:
            if not raw:
                waiting, self._waiting = self._waiting, deque()
                for _, answered in waiting:
                    answered(self.gone())
                return False
            answer: Allocated | Denied = msgspec.msgpack.decode(raw, type=Allocated | Denied)
            _, answered = self._waiting.popleft()
            if isinstance(answer, Denied):
                answered(from_code(answer.code, answer.message, answer.mend))
            else:
                answered(answer)
        self._flush()
        return True

    def tick(self, now: float) -> float | None:
        """Give the owner up when an answer is overdue. Returns when to come again."""
        self._flush()
        due = [now + _RESEND_S] if self._unsent else []
        if self._waiting:
            due.append(self._waiting[0][0])
            if due[-1] <= now:  # a late answer must not be taken for that to another request
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                return None
        return min(due, default=None)

    def allocate(self, nbytes: int) -> Allocated:
        """`request`, and wait for the answer. Raises: what it tells."""
        told: list[Allocated | DataError] = []
        self.request(nbytes, told.append)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while not told:
            due = self.tick(now := time.monotonic())
            poll.poll(None if due is None else max(0.0, due - now) * 1000)
            self.take()
        if isinstance(told[0], DataError):
            raise told[0]
        return told[0]

    def free(self, number: int) -> None:
        """Give memory back. Nothing happens where the owner has ended."""
        self._send(Free(number))

    def _send(self, message: Allocate | Free) -> None:
        self._unsent.append(msgspec.msgpack.encode(message))
        self._flush()

    def _flush(self) -> None:
        """Send what it has room for; `take` notices when it is gone."""
        with contextlib.suppress(OSError):
            while self._unsent:
                self._sock.send(self._unsent[0])
                self._unsent.popleft()

    def _receive(self) -> bytes | None:
        """The next answer; None when none has come, empty when there is no owner."""
        try:
            return self._sock.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def gone(self) -> SystemRefusal:
        """What to say once it has ended."""
        return SystemRefusal(
            f"the owner of the memory of device {self.device} (process {self.process.pid}) has ended, or not answered "
            f"for {ANSWER_S:g} s, and the memory is gone with it",
            "start the memory manager again",
        )

    def close(self) -> None:
        """End it; its memory goes back to the device."""
        self._sock.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Memory:
    """What an owner has allocated."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._used = False
        self._numbers = itertools.count(1)
        self._pointers: dict[int, int] = {}

    def allocate(self, nbytes: int) -> Allocated:
        if nbytes <= 0 or nbytes % cuda.IPC_GRAIN:
            raise BadMessage(f"{nbytes} bytes of device memory", f"give a multiple of {cuda.IPC_GRAIN}")
        if not self._used:
            cuda.use(self._device)
            self._used = True
        pointer = cuda.allocate(nbytes)
        try:
            handle = cuda.ipc_handle(pointer)
        except DataError:
            cuda.free(pointer)
            raise
        number = next(self._numbers)
        self._pointers[number] = pointer
        return Allocated(number, handle)

    def free(self, number: int) -> None:
        cuda.free(self._pointers.pop(number))


def serve(sock: socket.socket, device: int) -> None:
    """Answer the manager until it is gone."""
    memory = _Memory(device)
    while raw := sock.recv(_MAX_MESSAGE):
        request: Allocate | Free = msgspec.msgpack.decode(raw, type=Allocate | Free)
        if isinstance(request, Free):
            memory.free(request.number)
            continue
        answer: Allocated | Denied
        try:
            answer = memory.allocate(request.nbytes)
        except DataError as error:
            answer = Denied(error.code, error.message, error.mend)
        sock.send(msgspec.msgpack.encode(answer))


def main(argv: Sequence[str]) -> None:
    """Arguments: the number of the socket's descriptor, the device."""
    with socket.socket(fileno=int(argv[1])) as sock:
        serve(sock, int(argv[2]))
    os._exit(0)  # the driver frees the memory; its own tear-down may wait for kernels of others


if __name__ == "__main__":
    main(sys.argv)
