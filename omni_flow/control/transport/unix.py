"""Unix-domain SEQPACKET: the default between processes of one node, and the hot path of the whole control flow.

One connection for each ordered pair of processes, opened by the sender at its first batch. `send` writes to the
socket itself; only when the kernel's buffer is full does a queue and a writer of the loop come in. The packets are
described in `packets.py`. A peer is lost as one: the end of either direction ends both.
"""

import asyncio
import errno
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from omni_flow.control.transport.base import Codec, OnBatch, OnLost, Transport, within_limit
from omni_flow.control.transport.directory import SocketFile, claimed, private_directory, socket_path
from omni_flow.control.transport.errors import AddressError, ProtocolError, TransportClosed
from omni_flow.control.transport.packets import PACKET_BYTES, REFUSED, WHOLE, Joiner, cut, hello, read_hello

log = logging.getLogger(__name__)

_BUFFER_BYTES = 512 * 1024  # asked for; the kernel caps it at net.core.wmem_max
_BUDGET_BYTES = 1024 * 1024  # one peer's turn, reading or writing, before the others have theirs
_DRAIN_BYTES = 64 * _BUDGET_BYTES  # more than the kernel holds for a dead peer
_PACKET_COST = 1024  # what a packet costs of that budget beside its bytes
_ACCEPT_PAUSE_S = 1.0  # when the process is out of file descriptors
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_UCRED = struct.Struct("3i")


class _Incoming:
    """A connection that a peer opened to us. `peer` is known after its hello."""

    __slots__ = ("joiner", "peer", "receive", "sock")

    def __init__(self, sock: socket.socket, scratch: memoryview) -> None:
        self.sock = sock
        self.receive: Callable[[memoryview, int, int], int] = sock.recv_into
        self.joiner = Joiner(scratch)
        self.peer: _Peer | None = None


class _Peer:
    """One incarnation of the channel to and from an address."""

    __slots__ = ("address", "ended", "incoming", "outgoing", "queue", "write")

    def __init__(self, address: str) -> None:
        self.address = address
        self.outgoing: socket.socket | None = None
        self.write: Callable[[bytes | memoryview], int] | None = None  # of `outgoing`, while it is open
        self.incoming: _Incoming | None = None
        self.queue: deque[bytes | memoryview] = deque()  # packets; not empty: a writer of the loop is set
        self.ended: str | None = None  # the cause, once on_lost is on its way


class UnixTransport(Transport):
    """`unix:///directory/name.sock`. The directory gets mode 0700; peers of another user are refused (SO_PEERCRED)."""

    def __init__(self, url: str, codec: Codec, *, uid: int | None = None) -> None:
        """`uid`: whose processes may connect; this process's effective user unless given.

        Raises: AddressError, AddressTooLong.
        """
        self.address = url
        self._path = socket_path(url, "unix")
        self._codec = codec
        self._encode, self._decode = codec.encode, codec.decode
        self._uid = os.geteuid() if uid is None else uid
        self._scratch = memoryview(bytearray(PACKET_BYTES))
        self._peers: dict[str, _Peer] = {}
        self._strangers: set[_Incoming] = set()  # accepted, no hello yet
        self._listener: socket.socket | None = None
        self._file: SocketFile | None = None
        self._state = "was not started"
        self._flushed: asyncio.Future[None] | None = None

    async def start(self, on_batch: OnBatch, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_batch, self._on_lost = on_batch, on_lost
        private_directory(os.path.dirname(self._path))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            with claimed(self.address, self._path, socket.SOCK_SEQPACKET):
                listener.bind(self._path)
                listener.listen(4096)
                self._file = SocketFile(self._path)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._state = ""
        self._loop.add_reader(listener.fileno(), self._accept)

    # ------------------------------------------------------------------ sending

    def send(self, address: str, batch: list[Any]) -> None:
        packet = self._encode(batch)
        peer = self._peers.get(address)
        if peer is not None and peer.write is not None and not peer.queue and len(packet) < PACKET_BYTES:
            try:
                peer.write(WHOLE + packet)
            except BlockingIOError:
                self._queue_packets(peer, [WHOLE + packet])
            except OSError as error:
                self._end(peer, _cause(error))
            return
        self._send_slowly(address, packet, batch)

    def _send_slowly(self, address: str, packet: bytes, batch: list[Any]) -> None:
        """The first batch to a peer, a large one, or one behind others."""
        if self._state:
            raise TransportClosed(self._state)
        messages = within_limit(self._codec, address, batch, packet)
        peer = self._connected(address)
        if peer is None:
            return
        self._queue_packets(peer, [packet for message in messages for packet in cut(message)])

    def _queue_packets(self, peer: _Peer, packets: list[bytes | memoryview]) -> None:
        waiting = bool(peer.queue)
        peer.queue.extend(packets)
        if not waiting:
            self._write(peer, watched=False)

    def _write(self, peer: _Peer, watched: bool) -> None:
        """Send from the queue until it is empty, the kernel takes no more, or the peer has had its turn."""
        queue, write, outgoing = peer.queue, peer.write, peer.outgoing
        assert write is not None
        assert outgoing is not None
        budget = _BUDGET_BYTES
        try:
            while queue and budget > 0:
                budget -= write(queue[0]) + _PACKET_COST
                queue.popleft()
        except BlockingIOError:
            pass  # the loop says when there is room
        except OSError as error:
            self._end(peer, _cause(error))
            return
        if queue and not watched:
            self._loop.add_writer(outgoing.fileno(), self._write, peer, True)
        elif not queue and watched:
            self._loop.remove_writer(outgoing.fileno())
            self._note_flushed()

    def _connected(self, address: str) -> _Peer | None:
        """The peer with an open outgoing connection; None if it is lost (and that is or will be said)."""
        peer = self._peers.get(address)
        if peer is None:
            path = socket_path(address, "unix")
            peer = self._peers[address] = _Peer(address)
        elif peer.ended is not None:
            return None
        elif peer.write is not None:
            return peer
        else:
            path = socket_path(address, "unix")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            sock.connect(path)
            if (uid := _peer_uid(sock)) != self._uid:
                raise PermissionError(errno.EACCES, f"the listener runs as uid {uid}, not {self._uid}")
            sock.send(hello(self.address))
        except OSError as error:
            sock.close()
            self._end(peer, _cause(error))
            return None
        peer.outgoing, peer.write = sock, sock.send
        self._loop.add_reader(sock.fileno(), self._outgoing_ended, peer)
        return peer

    def _outgoing_ended(self, peer: _Peer) -> None:
        """The receiver says nothing on our connection but a refusal, so whatever there is to read ends it."""
        assert peer.outgoing is not None
        cause = "the peer closed the connection"
        for _ in range(2):  # an error that is pending on the socket comes before the refusal
            try:
                said = peer.outgoing.recv(4096)
            except BlockingIOError:
                break
            except OSError as error:
                cause = _cause(error)
                continue
            if said[:1] == REFUSED:
                cause = f"refused by the peer: {said[1:].decode(errors='replace')}"
            break
        self._end(peer, cause)

    # ------------------------------------------------------------------ receiving

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                log.error("%s cannot accept: %s; again in %s s", self.address, error, _ACCEPT_PAUSE_S)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
                return
            sock.setblocking(False)
            conn = _Incoming(sock, self._scratch)
            self._strangers.add(conn)
            if (uid := _peer_uid(sock)) != self._uid:
                self._refuse(conn, f"uid {uid} may not connect, only {self._uid}")
            else:
                self._loop.add_reader(sock.fileno(), self._read_hello, conn)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _read_hello(self, conn: _Incoming) -> None:
        try:
            size = conn.receive(self._scratch, 0, socket.MSG_TRUNC)
            if not size:  # came and went, like the probe of a process that wants our name
                self._drop_incoming(conn)
                return
            address = read_hello(self._scratch[:size])
            socket_path(address, "unix")
        except BlockingIOError:
            return
        except (OSError, ProtocolError, AddressError) as error:
            self._refuse(conn, str(error))
            return
        peer = self._peers.get(address)
        if peer is not None and peer.incoming is not None:
            self._end(peer, "the peer opened a new connection")
        if peer is not None and peer.ended is not None:
            self._finish(peer)
            peer = self._peers.get(address)
        if conn.sock.fileno() < 0:  # closed by a callback
            return
        if peer is None:
            peer = self._peers[address] = _Peer(address)
        self._strangers.discard(conn)
        conn.peer, peer.incoming = peer, conn
        self._loop.add_reader(conn.sock.fileno(), self._read, conn)
        self._read(conn)

    def _read(self, conn: _Incoming) -> None:
        peer = conn.peer
        assert peer is not None
        cause = self._receive(conn, peer, _BUDGET_BYTES)
        if cause is not None:
            self._end(peer, cause)

    def _receive(self, conn: _Incoming, peer: _Peer, budget: int) -> str | None:
        """Deliver what has come, at most about `budget` bytes of it; the cause if the connection is at its end."""
        joiner, receive, decode = conn.joiner, conn.receive, self._decode
        while budget > 0:
            try:
                size = receive(joiner.target, 0, socket.MSG_TRUNC)
            except BlockingIOError:
                return None
            except OSError as error:
                return _cause(error)
            if not size:
                return "the peer closed the connection" if joiner.idle else "the peer closed in the middle of a batch"
            budget -= size + _PACKET_COST
            try:
                packet = joiner.take(size)
                if packet is None:
                    continue
                batch = decode(packet)
            except Exception as error:  # whatever a codec raises for bytes that are no batch
                cause = f"malformed packet: {type(error).__name__}: {error}"
                self._refuse(conn, cause)
                return cause
            self._on_batch(peer.address, batch)
            if conn.peer is None:  # forgotten or closed by the callback
                return None
        return None

    def _refuse(self, conn: _Incoming, cause: str) -> None:
        who = conn.peer.address if conn.peer else "an unknown peer"
        log.warning("%s refuses %s: %s", self.address, who, cause)
        try:
            conn.sock.send(REFUSED + cause.encode()[:1024])
        except OSError as error:
            log.debug("%s is gone before it could be told: %s", who, error)
        self._drop_incoming(conn)

    # ------------------------------------------------------------------ ends

    def _end(self, peer: _Peer, cause: str) -> None:
        """The first sign that a peer is gone: send no more, and tell it from a callback of its own."""
        if peer.ended is not None:
            return
        peer.ended = cause
        self._drop_outgoing(peer)
        if peer.incoming is not None:
            self._loop.remove_reader(peer.incoming.sock.fileno())
        self._loop.call_soon(self._finish, peer)

    def _finish(self, peer: _Peer) -> None:
        """Deliver what the lost peer had sent, then say that it is lost."""
        try:
            if peer.incoming is not None:
                self._receive(peer.incoming, peer, _DRAIN_BYTES)
        finally:
            if self._peers.get(peer.address) is peer:  # not forgotten, and not said already
                self._drop(peer)
                self._on_lost(peer.address, peer.ended or "")

    def forget(self, address: str) -> None:
        peer = self._peers.get(address)
        if peer is not None:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.address]
        self._drop_outgoing(peer)
        if peer.incoming is not None:
            self._drop_incoming(peer.incoming)

    def _drop_outgoing(self, peer: _Peer) -> None:
        peer.queue.clear()
        sock, peer.outgoing, peer.write = peer.outgoing, None, None
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            sock.close()
        self._note_flushed()

    def _drop_incoming(self, conn: _Incoming) -> None:
        self._strangers.discard(conn)
        if conn.peer is not None:
            conn.peer.incoming = None
            conn.peer = None
        if conn.sock.fileno() >= 0:
            self._loop.remove_reader(conn.sock.fileno())
            conn.sock.close()

    async def close(self, deadline_s: float = 5.0) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self._loop.remove_reader(listener.fileno())
        listener.close()
        if self._file is not None:
            self._file.unlink()
        if self._queued():
            self._flushed = self._loop.create_future()
            try:
                await asyncio.wait_for(self._flushed, deadline_s)
            except TimeoutError:
                for peer in self._queued():
                    log.warning("%s closes with %d packets unsent to %s", self.address, len(peer.queue), peer.address)
            finally:
                self._shut()
        else:
            self._shut()

    def _shut(self) -> None:
        self._state = "is closed"
        for peer in list(self._peers.values()):
            self._drop(peer)
        for conn in list(self._strangers):
            self._drop_incoming(conn)

    def _queued(self) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.queue]

    def _note_flushed(self) -> None:
        if self._flushed is not None and not self._flushed.done() and not self._queued():
            self._flushed.set_result(None)


def _peer_uid(sock: socket.socket) -> int:
    return int(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


def _cause(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"
