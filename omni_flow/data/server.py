"""The memory manager: one process, one thread, one epoll. It moves no bytes of pages and waits for nothing.

`Server` owns the arenas and the sessions and hands each message to the service of its op. What a service does later
(waits, deadlines, reclaim) it does in `tick` or in slices, so that no client waits long for another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from omni_flow.data.device_memory import DeviceMemory
from omni_flow.data.errors import (
    BadMessage,
    DataError,
    InternalError,
    Refused,
    StaleEpoch,
    SystemRefusal,
    UnknownName,
)
from omni_flow.data.handshake import naming_vector
from omni_flow.data.hostid import host_id
from omni_flow.data.inspection import Inspection
from omni_flow.data.messages import ArenaRef, Hello, PoolInfo, Welcome
from omni_flow.data.protocol import Message, Op, decode, peek
from omni_flow.data.served_arenas import ServedArenas
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.session import Handler, Service, Session, Wire
from omni_flow.data.unix_front import UnixFront
from omni_flow.data.zmq_front import ZmqFront

log = logging.getLogger("omni_flow.data")
SLICE_S: Final = 0.001
LINGER_S: Final = 0.002
QUICK: Final = frozenset((Op.PING, Op.PROBE, Op.LOOKUP, Op.UNPIN, Op.COMMIT, Op.T_FLUSH, Op.T_RENEW, Op.T_RETURN))
ROLES: Final = ("client", "engine", "mover", "viewer")


@dataclass(slots=True)
class Reclaim:
    """The end of a session, in slices."""

    session: Session
    steps: Iterator[None]
    began: float
    slices: int = 0
    worst: float = 0.0
    freed: dict[str, int] = field(default_factory=dict)


class Server:
    """See the module. `services` are those of `services.default_services` plus whatever else the node offers."""

    def __init__(self, config: ServerConfig, services: Callable[[Server], Sequence[Service]]) -> None:
        self.config = config
        self.epoch = int.from_bytes(os.urandom(8), "little") >> 1 | 1
        self.poll = select.epoll()
        self.sessions: dict[int, Session] = {}
        self.reclaims: deque[Reclaim] = deque()
        self.watch: dict[int, Callable[[int], None]] = {}
        self.counters: dict[str, int] = dict.fromkeys(
            ("requests", "bad_messages", "failures", "sessions_opened", "sessions_closed", "internal_errors"), 0
        )
        self.reclaim_worst_s = 0.0
        self.reclaim_last_s = 0.0
        self.reclaim_seen_at = 0.0
        self._numbers = 0
        self._running = True  # from here on: a SIGTERM may come before `run`
        self._timed = False
        self.failure: DataError | None = None
        self.on_stop: list[Callable[[], None]] = []
        uids = frozenset((os.getuid(), *config.uids))
        self.front = UnixFront(  # first: who may not serve here makes no memory
            config.path, self.poll, self.watch, uids, self.open_session, self.receive, self.close_session
        )
        try:
            self._make(config, services)
        except BaseException:
            self.front.close()
            raise

    def _make(self, config: ServerConfig, services: Callable[[Server], Sequence[Service]]) -> None:
        """Arenas, services, and at last the ways in."""
        self.devices = DeviceMemory(config.device_memory, self.watch_fd, self.fail)
        self.arenas = ServedArenas(config, self.devices)
        self.services: list[Service] = list(services(self))
        self.handlers: dict[int, Handler] = {
            Op.HELLO: self._hello,
            Op.ARENA: self._arena,
            Op.PING: self._ping,
            Op.KEEPALIVE: self._keepalive,
            Op.GOODBYE: self._goodbye,
            **Inspection(self).ops,
        }
        for service in self.services:
            self.handlers.update(service.ops)
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.watch_fd(self._wake_r, self._woken)
        self.zmq = ZmqFront(self, config.endpoints, config.shared_key) if config.endpoints else None
        self.front.open()

    # -- the loop -----------------------------------------------------------------------------------------------

    def watch_fd(self, fd: int, ready: Callable[[int], None]) -> None:
        """Call `ready(events)` when `fd` can be read."""
        self.watch[fd] = ready
        self.poll.register(fd, select.EPOLLIN)

    def unwatch_fd(self, fd: int) -> None:
        del self.watch[fd]
        self.poll.unregister(fd)

    def _woken(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)

    def run(self) -> None:
        """Serve until `stop`.

        `tick` runs at once after operations that start something with a deadline; after quick ones it may wait for
        up to 64 rounds or `LINGER_S` of silence."""
        poll, watch = self.poll, self.watch
        due = 0.0
        more = stale = False
        rounds = 0
        while self._running:
            if self.reclaims or more:
                timeout = 0.0
            elif stale:
                timeout = LINGER_S
            else:
                timeout = -1.0 if due < 0 else max(0.0, due - time.monotonic())
            ready = poll.poll(timeout)
            for fd, events in ready:
                handler = watch.get(fd)
                if handler is not None:
                    handler(events)
            if self.zmq is not None:
                more = self.zmq.drain()
            if self.reclaims:
                self._reclaim_slice()
            rounds += 1
            stale = bool(ready) and not self._timed and bool(rounds & 63) and (due < 0 or time.monotonic() < due)
            if not stale:
                self._timed = False
                due = self._tick()
        self._shut()

    def stop(self) -> None:
        """End `run`; may be called from a signal handler or another thread."""
        self._running = False
        with contextlib.suppress(OSError):  # already closed
            os.write(self._wake_w, b"x")

    def fail(self, error: DataError) -> None:
        """End `run`: something that clients have mapped is gone, so nothing that is held here can be trusted."""
        log.critical("the memory manager ends", extra={"error": str(error)})
        self.failure = error
        self.stop()

    def _tick(self) -> float:
        now = time.monotonic()
        times = [t for t in (service.tick(now) for service in self.services) if t is not None]
        if self.zmq is not None:
            times.append(self.zmq.tick(now))
        overdue = self.devices.tick(now)
        if overdue is not None:
            times.append(overdue)
        return min(times) if times else -1.0

    def _shut(self) -> None:
        if self.zmq is not None:
            self.zmq.close()
        self.front.close()
        for hook in self.on_stop:
            hook()
        while self.reclaims:
            self._reclaim_slice()
        os.close(self._wake_r)
        os.close(self._wake_w)
        self.poll.close()
        self.arenas.close()
        self.devices.close()

    # -- sessions -----------------------------------------------------------------------------------------------

    def open_session(self, wire: Wire, pid: int, uid: int) -> Session:
        self._numbers += 1
        session = Session(self._numbers, wire, pid, uid, self.epoch)
        session.secret = int.from_bytes(os.urandom(8), "little") >> 1
        self.sessions[session.id] = session
        self.counters["sessions_opened"] += 1
        return session

    def close_session(self, session: Session) -> None:
        """The connection has ended: everything held through it goes back, in slices."""
        if session.closed:
            return
        session.closed = True
        self._timed = True
        self.sessions.pop(session.id, None)
        self.counters["sessions_closed"] += 1
        if session.ready:
            self.reclaim_seen_at = time.monotonic()
            self.reclaims.append(Reclaim(session, self._close_all(session), self.reclaim_seen_at))

    def _close_all(self, session: Session) -> Iterator[None]:
        for service in self.services:
            yield from service.closed(session)

    def _reclaim_slice(self) -> None:
        """About a millisecond of the oldest reclaim."""
        reclaim = self.reclaims[0]
        began = time.monotonic()
        while True:
            try:
                next(reclaim.steps)
            except StopIteration:
                self.reclaims.popleft()
                self.reclaim_last_s = time.monotonic() - reclaim.began
                log.info(
                    "reclaimed session",
                    extra={
                        "session": reclaim.session.id,
                        "pid": reclaim.session.pid,
                        "client": reclaim.session.name,
                        "role": reclaim.session.role,
                        "slices": reclaim.slices,
                        "seconds": round(self.reclaim_last_s, 6),
                        "freed": dict(reclaim.session.state.get("freed", {})),
                    },
                )
                return
            reclaim.slices += 1
            spent = time.monotonic() - began
            self.reclaim_worst_s = max(self.reclaim_worst_s, spent)
            if spent > SLICE_S:
                self.reclaims.rotate(-1)
                return

    # -- messages -----------------------------------------------------------------------------------------------

    def receive(self, session: Session, buffer: bytearray | bytes, length: int, fds: Sequence[int]) -> None:
        """Serve one message as it came."""
        self.counters["requests"] += 1
        try:
            message = decode(buffer, length, fds)
            op = message.op
            if op not in QUICK:
                self._timed = True
            handler = self.handlers.get(op)
            if handler is None or message.flags & 7:
                raise BadMessage(f"op {op} with flags {message.flags}", "see docs/data_plane.md")
            if not session.ready:
                if op not in (Op.HELLO, Op.ARENA, Op.KEEPALIVE):
                    if message.epoch and message.epoch != self.epoch:
                        raise StaleEpoch("this memory manager was started again", "register again")
                    raise Refused("no HELLO yet", "say HELLO first")
            elif message.epoch != self.epoch:
                raise StaleEpoch("this memory manager was started again", "register again")
        except DataError as error:
            for fd in fds:
                os.close(fd)
            self.counters["bad_messages"] += isinstance(error, BadMessage)
            op, request = peek(buffer, length)
            session.refuse(op, request, error)
            return
        try:
            handler(session, message)
        except DataError as error:
            self.counters["failures"] += 1
            session.fail(message, error)
        except OSError as error:
            self.counters["failures"] += 1
            log.warning("op %s of %s: %s", message.op, session, error)
            session.fail(message, SystemRefusal(f"the system refuses: {error}", "see the limits of the server process"))
        except Exception as error:
            self.counters["internal_errors"] += 1
            log.exception("op %s of %s", message.op, session)
            session.fail(message, InternalError(f"{type(error).__name__}: {error}", "see the log; this is a defect"))
        finally:
            for fd in message.fds:
                os.close(fd)

    def _hello(self, session: Session, message: Message) -> None:
        hello = message.body(Hello)
        if session.ready:
            raise Refused("HELLO twice on one connection", "open another connection")
        if hello.role not in ROLES:
            raise UnknownName(f"role {hello.role!r}", f"one of {', '.join(ROLES)}")
        if hello.vector and hello.vector != naming_vector():
            raise Refused("this client names pages differently", "install the same version on both sides")
        if len(hello.name) > 200:
            raise BadMessage(f"a name of {len(hello.name)} characters", "at most 200")
        session.role, session.name = hello.role, hello.name
        session.read_only = hello.read_only or hello.role == "viewer"
        session.kinds, session.quotas = hello.kinds, hello.quotas
        here = session.uid >= 0 or hello.host == host_id()
        if session.uid < 0 and here:
            session.pid = hello.pid
        opened: list[Service] = []
        try:
            for service in self.services:
                opened.append(service)
                service.opened(session)
            if self.zmq is not None and session.uid < 0:
                self.zmq.tie(session, hello.pid, here)
        except (DataError, OSError):
            for service in opened:
                for _ in service.closed(session):
                    pass
            raise
        session.ready = True
        node = self.config.node or os.uname().nodename[:32]
        pools = tuple(
            PoolInfo(p.name, p.page_bytes, p.l1_pages, p.l2_pages, p.l3_pages > 0, p.l1_device, p.planes)
            for p in self.config.pools
        )
        welcome = Welcome(
            session.id,
            self.epoch,
            pools,
            self.arenas.names,
            self.config.temp_bytes,
            self.config.path,
            session.secret,
            node,
            here,
        )
        session.reply(message, welcome)

    def _arena(self, session: Session, message: Message) -> None:
        """One descriptor. A connection without `HELLO` may ask on behalf of a session whose secret it knows."""
        ref = message.body(ArenaRef)
        owner = session
        if not session.ready:
            found = self.sessions.get(ref.session)
            if found is None or found.secret != ref.secret or found.uid not in (session.uid, -1):
                raise Refused("ARENA without HELLO", "say HELLO first, or name the session and its secret")
            owner = found
        self.arenas.hand_out(ref, owner, session, message)

    def _ping(self, session: Session, message: Message) -> None:
        session.reply(message)

    def _keepalive(self, session: Session, message: Message) -> None:
        """One-way: the session named in it lives, and so does this connection."""
        ref = message.body(ArenaRef)
        found = self.sessions.get(ref.session)
        if self.zmq is not None and found is not None and found.secret == ref.secret:
            self.zmq.keep(ref.session)

    def _goodbye(self, session: Session, message: Message) -> None:
        session.reply(message)
        session.wire.shut()


def serve(
    config: ServerConfig,
    services: Callable[[Server], Sequence[Service]],
    ready: Callable[[Server], None] = lambda _server: None,
) -> None:
    """Run a server in this process until SIGTERM or SIGINT; calls `ready` once clients may connect.

    Raises:
        DataError: it can't be made, or has failed.
    """
    server = Server(config, services)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _n, _f: server.stop())
    ready(server)
    log.info("memory manager ready", extra={"path": config.path, "epoch": server.epoch})
    server.run()
    if server.failure is not None:
        raise server.failure
