"""The server's Unix SEQPACKET side: sockets, peer identity, descriptors, queues of what could not be sent yet."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from omni_flow.data.errors import BadMessage, Refused, SystemRefusal
from omni_flow.data.protocol import MAX_MESSAGE, Op, peek
from omni_flow.data.session import Session

MAX_FDS: Final = 253
_QUEUE_BYTES: Final = 8 << 20
_ANCILLARY: Final = socket.CMSG_SPACE(MAX_FDS * 4)
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_CUT: Final = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)
_IN: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
_OUT: Final = select.EPOLLOUT
_ELSEWHERE: Final = "choose another path"
_UCRED: Final = struct.Struct("iII")


class UnixWire:
    """One accepted connection."""

    __slots__ = ("_poll", "_queue", "_queued", "_send", "broken", "fds_next", "receive", "sock")

    def __init__(self, sock: socket.socket, poll: select.epoll) -> None:
        self.sock = sock
        self.receive = sock.recv_into
        self._send = sock.send
        self.broken = False
        self.fds_next = False
        self._poll = poll
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._queued = 0

    def send(self, data: bytes, fds: Sequence[int]) -> None:
        if not fds and not self._queue and not self.broken:
            try:
                self._send(data)
            except OSError:
                self._later(data, fds)
        elif not self.broken and (self._queue or not self._try(data, fds)):
            self._later(data, fds)

    def _later(self, data: bytes, fds: Sequence[int]) -> None:
        """What could not be sent at once: queue it, unless the peer is gone or does not read."""
        if (not self._queue and self._try(data, fds)) or self.broken:
            return
        if self._queued + len(data) > _QUEUE_BYTES:
            self.broken = True
            self.shut()
            return
        self._queue.append((data, [os.dup(fd) for fd in fds]))
        self._queued += len(data)
        self._poll.modify(self.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _try(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            if fds:
                socket.send_fds(self.sock, [data], list(fds))
            else:
                self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return False
            self.broken = True
            return False
        return True

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        while self._queue:
            data, fds = self._queue[0]
            if not self._try(data, fds):
                if self.broken:
                    self.drop()
                return
            self._queue.popleft()
            self._queued -= len(data)
            for fd in fds:
                os.close(fd)
        self._poll.modify(self.sock.fileno(), select.EPOLLIN)

    def shut(self) -> None:
        with contextlib.suppress(OSError):  # the peer may be gone already: the end of file comes either way
            self.sock.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Forget what is queued."""
        while self._queue:
            for fd in self._queue.popleft()[1]:
                os.close(fd)


class UnixFront:
    """Accepts connections and turns datagrams into messages; from `open` on. Until then it keeps others from the path.

    Args:
        path: of the socket; its directory must belong to this user alone. A socket left by a dead server is replaced.
        poll, watch: the server's epoll, and what to call when a descriptor is ready.
        uids: who may connect.
    """

    def __init__(
        self,
        path: str,
        poll: select.epoll,
        watch: dict[int, Callable[[int], None]],
        uids: frozenset[int],
        open_session: Callable[[UnixWire, int, int], Session],
        handle: Callable[[Session, bytearray, int, Sequence[int]], None],
        close_session: Callable[[Session], None],
    ) -> None:
        """Raises: Refused, SystemRefusal: nothing can be served at `path`."""
        self.path = path
        self._poll = poll
        self._uids = uids
        self._open, self._handle, self._close = open_session, handle, close_session
        self._watch = watch
        self._sessions: dict[int, tuple[Session, UnixWire]] = {}
        self._buffer = bytearray(MAX_MESSAGE + 4096)
        self.foreign = 0
        self._lock = self._claim(path)
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Clients may connect from now on. Raises: SystemRefusal."""
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            listener.bind(self.path)
            os.chmod(self.path, 0o600 if self._uids == {os.getuid()} else 0o666)
            listener.listen(128)
        except OSError as error:
            raise SystemRefusal(f"can't serve at {self.path}: {error.strerror or error}", _ELSEWHERE) from error
        self._watch[listener.fileno()] = self._accept
        self._poll.register(listener.fileno(), select.EPOLLIN)

    @staticmethod
    def _claim(path: str) -> int:
        """Take the lock beside the socket.

        Raises:
            Refused: another server lives there, the directory is open to others, or the path is something else's.
            SystemRefusal: no socket can be there.
        """
        folder = os.path.dirname(os.path.abspath(path))
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            mode = os.stat(folder)
            if mode.st_uid != os.getuid() or mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise Refused(f"directory {folder} can be written by others", "use a directory of mode 0700")
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise Refused(f"{path} is there and no socket, it is left as it is", _ELSEWHERE)
            lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SystemRefusal(f"can't serve at {path}: {error.strerror}", _ELSEWHERE) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise Refused(f"a memory manager already serves {path}", "stop it or choose another path") from error
        return lock

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        try:
            pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            sock.setblocking(False)
            self._poll.register(sock.fileno(), select.EPOLLIN)
        except OSError:  # the kernel has no room for one more: its client sees the connection end
            sock.close()
            return
        wire = UnixWire(sock, self._poll)
        session = self._open(wire, pid, uid)
        fd = sock.fileno()
        self._sessions[fd] = (session, wire)

        def ready(events: int) -> None:
            if events & _OUT:
                wire.flush()
            if events & _IN:
                self._receive(fd, session, wire)

        self._watch[fd] = ready
        if uid not in self._uids:
            self.foreign += 1
            session.refuse(0, 0, Refused(f"user {uid} may not use this memory manager", "add the uid to its config"))
            self._end(fd, session, wire)

    def _turn_away(self) -> None:
        """There is no descriptor for who comes: he is told so by the end of his connection."""
        assert self._listener is not None
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):  # others may have taken the descriptor; the next round tries again
            self._listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _receive(self, fd: int, session: Session, wire: UnixWire) -> None:
        fds: list[int] = []
        try:
            if wire.fds_next:
                length, fds = self._receive_fds(wire)
            else:
                length = wire.receive(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            length = 0
        if not length:
            self._end(fd, session, wire)
            return
        if length > MAX_MESSAGE:
            for one in fds:
                os.close(one)
            op, request = peek(self._buffer, length)
            session.refuse(op, request, BadMessage("message cut off", f"at most {MAX_MESSAGE} bytes"))
            return
        if self._buffer[1] == Op.FDS_NEXT:
            wire.fds_next = True
            return
        self._handle(session, self._buffer, length, fds)
        if wire.broken:
            self._end(fd, session, wire)

    def _receive_fds(self, wire: UnixWire) -> tuple[int, list[int]]:
        """The message announced by FDS_NEXT, with its descriptors."""
        wire.fds_next = False
        length, ancillary, flags, _ = wire.sock.recvmsg_into([self._buffer], _ANCILLARY, _CLOEXEC)
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                fds.extend(received)
        if flags & _CUT:
            length = MAX_MESSAGE + 1
        return length, fds

    def _end(self, fd: int, session: Session, wire: UnixWire) -> None:
        self._poll.unregister(fd)
        del self._sessions[fd], self._watch[fd]
        wire.broken = True
        wire.drop()
        wire.sock.close()
        self._close(session)

    def close(self) -> None:
        for fd, (session, wire) in list(self._sessions.items()):
            self._end(fd, session, wire)
        if self._listener is not None:
            if self._watch.pop(self._listener.fileno(), None):
                self._poll.unregister(self._listener.fileno())
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)
            self._listener.close()
        if self._spare >= 0:
            os.close(self._spare)
        os.close(self._lock)
