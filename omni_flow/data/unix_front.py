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

from omni_flow.data.errors import BadMessage, Refused
from omni_flow.data.protocol import MAX_MESSAGE, peek
from omni_flow.data.session import Session

MAX_FDS: Final = 253
_QUEUE_BYTES: Final = 8 << 20
_ANCILLARY: Final = socket.CMSG_SPACE(MAX_FDS * 4)
_UCRED: Final = struct.Struct("iII")


class UnixWire:
    """One accepted connection."""

    __slots__ = ("_poll", "_queue", "_queued", "broken", "sock")

    def __init__(self, sock: socket.socket, poll: select.epoll) -> None:
        self.sock = sock
        self.broken = False
        self._poll = poll
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._queued = 0

    def send(self, data: bytes, fds: Sequence[int]) -> None:
        if self.broken:
            return
        if not self._queue and self._try(data, fds):
            return
        if self.broken:
            return
        self._queued += len(data)
        if self._queued > _QUEUE_BYTES:
            self.broken = True
            self.shut()
            return
        self._queue.append((data, [os.dup(fd) for fd in fds]))
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
    """Accepts connections and turns datagrams into messages.

    Args:
        path: of the socket; its directory must belong to this user alone. A socket left by a dead server is replaced.
        poll: the server's epoll.
        uids: who may connect.
    """

    def __init__(
        self,
        path: str,
        poll: select.epoll,
        uids: frozenset[int],
        open_session: Callable[[UnixWire, int, int], Session],
        handle: Callable[[Session, bytearray, int, Sequence[int]], None],
        close_session: Callable[[Session], None],
    ) -> None:
        self.path = path
        self._poll = poll
        self._uids = uids
        self._open, self._handle, self._close = open_session, handle, close_session
        self._sessions: dict[int, tuple[Session, UnixWire]] = {}
        self._buffer = bytearray(MAX_MESSAGE + 4096)
        self._buffers = [self._buffer]
        self.foreign = 0
        self._lock = self._claim(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(path)
        os.chmod(path, 0o600 if uids == {os.getuid()} else 0o666)
        self._listener.listen(128)
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        poll.register(self._listener.fileno(), select.EPOLLIN)

    @staticmethod
    def _claim(path: str) -> int:
        """Take the lock beside the socket and remove the socket of a dead server.

        Raises:
            Refused: another server lives there, or the directory is open to others.
        """
        folder = os.path.dirname(os.path.abspath(path))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        mode = os.stat(folder)
        if mode.st_uid != os.getuid() or mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Refused(f"directory {folder} can be written by others", "use a directory of mode 0700")
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise Refused(f"a memory manager already serves {path}", "stop it or choose another path") from error
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return lock

    def owns(self, fd: int) -> bool:
        return fd in self._sessions or fd == self._listener.fileno()

    def ready(self, fd: int, events: int) -> None:
        """Serve one ready descriptor: one message, or one connection."""
        if fd == self._listener.fileno():
            self._accept()
            return
        session, wire = self._sessions[fd]
        if events & select.EPOLLOUT:
            wire.flush()
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._receive(fd, session, wire)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return
            os.close(self._spare)
            with contextlib.suppress(
                OSError
            ):  # somebody else may have taken the descriptor; the next round tries again
                self._listener.accept()[0].close()
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            return
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        sock.setblocking(False)
        wire = UnixWire(sock, self._poll)
        self._poll.register(sock.fileno(), select.EPOLLIN)
        session = self._open(wire, pid, uid)
        self._sessions[sock.fileno()] = (session, wire)
        if uid not in self._uids:
            self.foreign += 1
            session.refuse(0, 0, Refused(f"user {uid} may not use this memory manager", "add the uid to its config"))
            self._end(sock.fileno(), session, wire)

    def _receive(self, fd: int, session: Session, wire: UnixWire) -> None:
        try:
            length, ancillary, flags, _ = wire.sock.recvmsg_into(self._buffers, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            length, ancillary, flags = 0, [], 0
        if not length:
            self._end(fd, session, wire)
            return
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                fds.extend(received)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for one in fds:
                os.close(one)
            op, request = peek(self._buffer, length)
            session.refuse(op, request, BadMessage("message or descriptors cut off", f"at most {MAX_MESSAGE} bytes"))
            return
        self._handle(session, self._buffer, length, fds)
        if wire.broken:
            self._end(fd, session, wire)

    def _end(self, fd: int, session: Session, wire: UnixWire) -> None:
        self._poll.unregister(fd)
        del self._sessions[fd]
        wire.broken = True
        wire.drop()
        wire.sock.close()
        self._close(session)

    def close(self) -> None:
        for fd, (session, wire) in list(self._sessions.items()):
            self._end(fd, session, wire)
        self._poll.unregister(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._spare)
        os.close(self._lock)
