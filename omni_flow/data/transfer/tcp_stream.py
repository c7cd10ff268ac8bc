"""One stream of the tcp driver: a thread that moves chunks over one kept connection."""

import contextlib
import socket
import struct
import threading
from collections import deque
from itertools import chain, count
from typing import Protocol

from omni_flow.data.errors import DataError, from_code
from omni_flow.data.transfer import wire
from omni_flow.data.transfer.chunks import Chunk
from omni_flow.data.transfer.errors import (
    AuthRefused,
    ChecksumMismatch,
    PeerRestarted,
    PeerUnreachable,
    TransferError,
)
from omni_flow.data.transfer.tcp_parts import Peer, Task, TcpOptions

_MISMATCHES = 2
_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 1.0


class StreamOwner(Protocol):
    """What a stream asks of its driver; contracts at `TcpDriver`."""

    options: TcpOptions

    def await_work(self, stream: "Stream") -> bool: ...

    def take(self, stream: "Stream") -> tuple[Task, Chunk] | None: ...

    def settle(
        self, stream: "Stream", task: Task, chunk: Chunk, *, good: bool, error: DataError | None = None
    ) -> None: ...

    def fail_peer(self, peer: Peer, error: TransferError) -> None: ...

    def pause(self, stream: "Stream", seconds: float) -> None: ...


class Stream:
    """Runs `thread` until its owner has no work for it for a while. Only `kick` is for other threads."""

    def __init__(self, owner: StreamOwner, peer: Peer) -> None:
        self.peer = peer
        self.thread = threading.Thread(target=self._run, name="transfer-stream", daemon=True)
        self._owner = owner
        self._sock: socket.socket | None = None
        self._kicked = False
        self._window: deque[tuple[int, Task, Chunk]] = deque()
        self._tags = count(1)
        self._failures = 0
        self._header = memoryview(bytearray(wire.ANSWER.size))

    def kick(self) -> None:
        """End the connection; the thread gives its chunks back and connects anew. The owner's lock is held."""
        self._kicked = True
        sock = self._sock
        if sock is not None:
            # A socket that is not connected any more needs no kick.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            self._disconnect()

    def _step(self) -> bool:
        """Keep the window full and finish its oldest chunk. Connects before it takes anything, so that a job never
        waits for a connection to be stopped."""
        try:
            if not self._window and not self._owner.await_work(self):
                return False
            if self._sock is None:
                self._kicked = False
                self._sock = self._connect()
            while len(self._window) < self._owner.options.depth and (taken := self._owner.take(self)):
                self._window.append((next(self._tags), *taken))
                self._request(self._sock, *self._window[-1])
            if self._window:
                self._answer(self._sock)
        except (OSError, TransferError) as error:
            self._broken(error)
        return True

    def _connect(self) -> socket.socket:
        options, endpoint = self._owner.options, self.peer.endpoint
        sock = socket.create_connection((endpoint.host, endpoint.port), options.connect_s)
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.set_timeouts(sock, options.connect_s)
            wire.greet_as_client(sock, options.key or endpoint.secret, endpoint.boot)
            wire.set_timeouts(sock, options.stall_s)
        except BaseException:
            sock.close()
            raise
        return sock

    def _request(self, sock: socket.socket, tag: int, task: Task, chunk: Chunk) -> None:
        pieces = len(chunk.pieces)
        body = struct.pack(f"<{2 * pieces}Q", *chain.from_iterable((r, n) for _, r, n in chunk.pieces))
        if task.job.direction == "read":
            head = wire.Request(wire.READ, pieces, task.job.remote, tag, chunk.nbytes, 0)
            sock.sendall(head.pack() + body)
            return
        views = _views(task, chunk)
        head = wire.Request(wire.WRITE, pieces, task.job.remote, tag, chunk.nbytes, wire.checksum(views))
        wire.send_all(sock, [head.pack() + body, *views])

    def _answer(self, sock: socket.socket) -> None:
        tag, task, chunk = self._window[0]
        wire.receive_exact(sock, [self._header])
        answer = wire.Answer.unpack(bytes(self._header))
        if answer.tag != tag:
            raise wire.BadFrame(f"answer {answer.tag} to request {tag}")
        error: DataError | None = None
        if answer.status == wire.REFUSED:
            text = bytearray(answer.text_bytes)
            wire.receive_exact(sock, [memoryview(text)])
            code, _, words = text.decode("utf-8", "replace").partition("\n")
            error = from_code(code, words, "")
        elif task.job.direction == "read":
            error = self._fill(sock, task, chunk, answer)
        self._window.popleft()
        self._failures = 0
        if isinstance(error, ChecksumMismatch):
            task.mismatches += 1
            if task.mismatches <= _MISMATCHES:
                self._owner.settle(self, task, chunk, good=False)
                return
        self._owner.settle(self, task, chunk, good=error is None, error=error)

    def _fill(self, sock: socket.socket, task: Task, chunk: Chunk, answer: wire.Answer) -> ChecksumMismatch | None:
        if answer.nbytes != chunk.nbytes:
            raise wire.BadFrame(f"{answer.nbytes} bytes for a request of {chunk.nbytes}")
        views = _views(task, chunk)
        wire.receive_exact(sock, views)
        if wire.checksum(views) == answer.checksum:
            return None
        place = chunk.pieces[0][1]
        return ChecksumMismatch(
            f"{chunk.nbytes} bytes at {place} of the peer's arena {task.job.remote} arrived changed; "
            "look the page up again"
        )

    def _broken(self, error: OSError | TransferError) -> None:
        kicked = self._kicked
        self._disconnect()
        window, self._window = list(self._window), deque()
        for _, task, chunk in reversed(window):
            self._owner.settle(self, task, chunk, good=False)
        if isinstance(error, (AuthRefused, PeerRestarted)):
            self._owner.fail_peer(self.peer, error)
            return
        if kicked:
            return
        self._failures += 1
        if self._failures >= self._owner.options.attempts:
            endpoint = self.peer.endpoint
            self._owner.fail_peer(
                self.peer,
                PeerUnreachable(
                    f"{endpoint.host}:{endpoint.port} failed {self._failures} times in a row, at last with {error!r}"
                ),
            )
            self._failures = 0
            return
        self._owner.pause(self, min(_FIRST_PAUSE_S * 2.0**self._failures, _LAST_PAUSE_S))

    def _disconnect(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def _views(task: Task, chunk: Chunk) -> list[memoryview]:
    return [task.arena.view[at : at + length] for at, _, length in chunk.pieces]
