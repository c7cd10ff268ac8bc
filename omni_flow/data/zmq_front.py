"""The server's ZMQ side: ROUTER sockets with the same messages as over SEQPACKET.

ZMQ tells neither who a peer is nor when it dies. So a session whose client runs on this machine is tied to that
process by a pidfd, one from elsewhere to its keep-alives, and descriptors go over the Unix socket."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import zmq

from omni_flow.data.errors import BadMessage, SystemRefusal
from omni_flow.data.protocol import MAX_MESSAGE, peek
from omni_flow.data.session import Session
from omni_flow.data.zmq_keys import require_safe, server_keys

if TYPE_CHECKING:
    from omni_flow.data.server import Server

REMOTE_IDLE_S: Final = 15.0
_BURST: Final = 32
_HIGH_WATER: Final = 4096


class ZmqWire:
    """The way back to one ZMQ identity."""

    __slots__ = ("_front", "_identity", "broken", "seen")

    def __init__(self, front: ZmqFront, identity: bytes) -> None:
        self._front = front
        self._identity = identity
        self.broken = False
        self.seen = time.monotonic()

    def send(self, data: bytes, fds: Sequence[int]) -> None:
        if self.broken:
            return
        try:
            self._front.socket.send_multipart((self._identity, data), zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            self.broken = True

    def shut(self) -> None:
        self.broken = True


class ZmqFront:
    """All ZMQ endpoints of a server, on one ROUTER socket.

    Raises:
        Refused: an endpoint that others could reach, without a shared key.
        SystemRefusal: an endpoint that is in use, or none.
    """

    def __init__(self, server: Server, endpoints: Sequence[str], shared: str) -> None:
        self._server = server
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE + 4096)
        if shared:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, server_keys(shared)[1])
        for endpoint in endpoints:
            require_safe(endpoint, shared)
            try:
                if endpoint.startswith("ipc://"):
                    os.makedirs(os.path.dirname(endpoint[6:]) or ".", mode=0o700, exist_ok=True)
                self.socket.bind(endpoint)
            except (OSError, zmq.ZMQError) as error:
                raise SystemRefusal(
                    f"can't listen at {endpoint}: {error.strerror}", "choose another endpoint"
                ) from error
        self.sessions: dict[bytes, tuple[Session, ZmqWire]] = {}
        self._pidfds: dict[int, int] = {}
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self._next_sweep = 0.0
        server.watch_fd(self._fd, lambda _events: None)

    def drain(self) -> bool:
        """Serve what has come, a burst at most. Returns whether there may be more."""
        for _ in range(_BURST):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
            if len(parts) == 2:
                self._one(parts[0], parts[1])
            elif parts:
                self._one(parts[0], b"")
        return True

    def _one(self, identity: bytes, data: bytes) -> None:
        entry = self.sessions.get(identity)
        if entry is None:
            wire = ZmqWire(self, identity)
            entry = (self._server.open_session(wire, 0, -1), wire)
            self.sessions[identity] = entry
        session, wire = entry
        wire.seen = time.monotonic()
        if len(data) > MAX_MESSAGE:
            op, request = peek(data, len(data))
            session.refuse(op, request, BadMessage(f"message of {len(data)} bytes", f"at most {MAX_MESSAGE}"))
        else:
            self._server.receive(session, data, len(data), ())
        if wire.broken or session.closed:
            self._end(identity)

    def tie(self, session: Session, pid: int, local: bool) -> None:
        """At `HELLO`: watch the client's process if it is on this machine. Raises: OSError, it can't be watched."""
        if not local:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            session.wire.shut()
            return
        session.pid = pid
        session.state["zmq_local"] = True
        self._pidfds[session.id] = fd
        identity = next(key for key, (one, _) in self.sessions.items() if one is session)
        self._server.watch_fd(fd, lambda _events: self._end(identity))

    def _end(self, identity: bytes) -> None:
        entry = self.sessions.pop(identity, None)
        if entry is None:
            return
        session, wire = entry
        wire.broken = True
        fd = self._pidfds.pop(session.id, None)
        if fd is not None:
            self._server.unwatch_fd(fd)
            os.close(fd)
        self._server.close_session(session)

    def keep(self, session_id: int) -> None:
        """A keep-alive of a session came in on another socket of its client."""
        for session, wire in self.sessions.values():
            if session.id == session_id:
                wire.seen = time.monotonic()

    def tick(self, now: float) -> float:
        """End broken and silent sessions. Returns when to come again."""
        if now >= self._next_sweep:
            self._next_sweep = now + REMOTE_IDLE_S / 3
            for identity, (session, wire) in list(self.sessions.items()):
                silent = now - wire.seen > REMOTE_IDLE_S and not session.state.get("zmq_local")
                if wire.broken or silent or session.closed:
                    self._end(identity)
        return self._next_sweep

    def close(self) -> None:
        for identity in list(self.sessions):
            self._end(identity)
        self._server.unwatch_fd(self._fd)
        self.socket.close(0)
        self._context.term()
