"""The serving half of the tcp driver: peers read from and write to this node's arenas.

One thread accepts, one thread serves each connection: the sends and receives release the interpreter, and a slow peer
holds up nobody else. Garbage, half frames and strangers end their own connection only.
"""

import contextlib
import errno
import selectors
import socket
import struct
import threading

from omni_flow.data.transfer import wire
from omni_flow.data.transfer.arenas import ArenaMap
from omni_flow.data.transfer.base import ArenaId
from omni_flow.data.transfer.errors import ChecksumMismatch, TransferError

_GREETING_S = 5.0
_NO_DESCRIPTORS_S = 0.1


class TcpServer:
    """Listens and serves until `close`. `stall_s` bounds each wait for a peer inside a frame."""

    def __init__(
        self, arenas: ArenaMap, host: str, port: int, secret: bytes, boot: bytes, stall_s: float, limit: int
    ) -> None:
        self._arenas, self._secret, self._boot, self._stall_s, self._limit = arenas, secret, boot, stall_s, limit
        self._listener = socket.create_server((host, port), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="transfer-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._wake.close()
        self._thread.join()
        self._listener.close()
        self._woken.close()
        with self._lock:
            for sock in self._open:
                # The serving thread wakes, sees the end and closes its own socket.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while self._woken not in [key.fileobj for key, _ in ready.select()]:
                try:
                    sock, _ = self._listener.accept()
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        # Who waits in the backlog would wake the selector for ever: look away for a moment.
                        ready.unregister(self._listener)
                        ready.select(_NO_DESCRIPTORS_S)
                        ready.register(self._listener, selectors.EVENT_READ)
                    elif error.errno not in (errno.ECONNABORTED, errno.EINTR, errno.EPROTO):
                        raise
                    continue
                with self._lock:
                    full = len(self._open) >= self._limit
                    if not full:
                        self._open.add(sock)
                if full:
                    sock.close()
                    continue
                threading.Thread(target=self._serve, args=(sock,), name="transfer-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            wire.set_timeouts(sock, _GREETING_S)
            if wire.greet_as_server(sock, self._secret, self._boot):
                wire.set_timeouts(sock, self._stall_s)
                _Connection(sock, self._arenas).run()
        except OSError:
            # The peer's end of the connection, a stall or a bad frame: the client notices and asks again elsewhere.
            return
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()


class _Connection:
    """Serves one authenticated peer until it leaves."""

    def __init__(self, sock: socket.socket, arenas: ArenaMap) -> None:
        self._sock, self._arenas = sock, arenas
        self._header = memoryview(bytearray(wire.REQUEST.size))
        self._scratch = memoryview(bytearray(0))

    def run(self) -> None:
        while self._await_header():
            request = wire.Request.unpack(bytes(self._header))
            body = memoryview(bytearray(16 * request.pieces))
            wire.receive_exact(self._sock, [body])
            numbers = struct.unpack(f"<{2 * request.pieces}Q", body)
            pieces = list(zip(numbers[::2], numbers[1::2], strict=True))
            if sum(length for _, length in pieces) != request.nbytes:
                raise wire.BadFrame("the pieces do not add up to the request's bytes")
            (self._read if request.op == wire.READ else self._write)(request, pieces)

    def _await_header(self) -> bool:
        """Wait as long as it takes for the first byte, but not within the header; False at the end."""
        while True:
            try:
                got = self._sock.recv_into(self._header, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if got and got < len(self._header):
                wire.receive_exact(self._sock, [self._header[got:]])
            return got > 0

    def _read(self, request: wire.Request, pieces: list[tuple[int, int]]) -> None:
        try:
            arena = self._arenas.remote(ArenaId(request.arena), "read")
            arena.check(pieces)
        except TransferError as error:
            self._sock.sendall(wire.refusal(request.tag, error.code, str(error)))
            return
        views = [arena.view[offset : offset + length] for offset, length in pieces]
        head = wire.Answer(wire.GOOD, 0, request.tag, request.nbytes, wire.checksum(views)).pack()
        # Not sendfile: the chunk is in the cache from its checksum, and a copy from there was never slower and often
        # twice as fast as handing over page by page.
        wire.send_all(self._sock, [head, *views])

    def _write(self, request: wire.Request, pieces: list[tuple[int, int]]) -> None:
        try:
            arena = self._arenas.remote(ArenaId(request.arena), "write")
            arena.check(pieces)
        except TransferError as error:
            if len(self._scratch) < request.nbytes:
                self._scratch = memoryview(bytearray(request.nbytes))
            wire.receive_exact(self._sock, [self._scratch[: request.nbytes]])
            self._sock.sendall(wire.refusal(request.tag, error.code, str(error)))
            return
        views = [arena.view[offset : offset + length] for offset, length in pieces]
        wire.receive_exact(self._sock, views)
        if wire.checksum(views) != request.checksum:
            changed = ChecksumMismatch(f"{request.nbytes} bytes reached the peer changed")
            self._sock.sendall(wire.refusal(request.tag, changed.code, str(changed)))
            return
        self._sock.sendall(wire.Answer(wire.GOOD, 0, request.tag, 0, 0).pack())
