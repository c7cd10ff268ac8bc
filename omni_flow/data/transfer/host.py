"""A driver in a process of its own, seen from the process that owns the arenas."""

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from itertools import count
from typing import Literal

import msgspec
import numpy as np

from omni_flow.data.errors import from_code
from omni_flow.data.transfer.base import Access, ArenaId, Endpoint, Job, JobId, Outcome, Progress, Spans
from omni_flow.data.transfer.control import (
    AskProgress,
    Cancel,
    Channel,
    Configure,
    Ended,
    FromWorker,
    Ready,
    Refused,
    Register,
    Report,
    Start,
    ToWorker,
    close_all,
)
from omni_flow.data.transfer.errors import DriverDied

START_S = 30.0


class DriverHost:
    """Starts a driver's process, registers arenas with it and runs jobs on it.

    Thread-safe. An event loop watches `fileno()` and takes `events()`; a plain caller uses `wait`. When the process
    dies, every running job ends as DriverDied; `restart` starts another and registers the arenas again, under a new
    endpoint.
    """

    def __init__(self, driver: str = "tcp", options: msgspec.Struct | None = None) -> None:
        """Raises: DriverAbsent, BadJob, or DriverDied when the process does not come up."""
        self.driver = driver
        self._options = msgspec.msgpack.encode(options) if options is not None else b""
        self._lock = threading.RLock()
        self._ids = count(1)
        self._running: dict[JobId, int] = {}
        self._events: deque[Outcome] = deque()
        self._arenas: dict[ArenaId, tuple[int, int, Access]] = {}
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False as soon as the end of the process has been noticed."""
        return self._alive

    def endpoint(self) -> Endpoint:
        """For peers' jobs; changes with each arena and each restart."""
        return self._endpoint

    def fileno(self) -> int:
        """Readable when `events` may have something."""
        return self._channel.sock.fileno()

    def register_arena(self, arena: ArenaId, fd: int, size: int, access: Access = "none") -> None:
        """See `Driver.register_arena`. `fd` is duplicated and kept for restarts."""
        with self._lock:
            self._ask_ready(Register(arena, size, access), fd)
            self._arenas[arena] = (os.dup(fd), size, access)

    def submit(
        self,
        direction: Literal["read", "write"],
        peer: Endpoint,
        local: ArenaId,
        remote: ArenaId,
        spans: Spans,
        timeout_s: float,
    ) -> JobId:
        """Start a job and return at once; its outcome comes through `events` or `wait`."""
        with self._lock:
            id = JobId(next(self._ids))
            self._running[id] = int(np.sum(spans[:, 2])) if len(spans) else 0
            rows = np.ascontiguousarray(spans, np.uint64).tobytes()
            self._send(Start(Job(id, direction, peer, local, remote, rows, timeout_s)))
            return id

    def read(self, peer: Endpoint, local: ArenaId, remote: ArenaId, spans: Spans, timeout_s: float = 60.0) -> int:
        """Fill local spans from the peer's arena and wait. Returns bytes moved; raises the job's TransferError."""
        return self.wait(self.submit("read", peer, local, remote, spans, timeout_s)).check()

    def write(self, peer: Endpoint, local: ArenaId, remote: ArenaId, spans: Spans, timeout_s: float = 60.0) -> int:
        """Fill the peer's spans from the local arena and wait; as `read`."""
        return self.wait(self.submit("write", peer, local, remote, spans, timeout_s)).check()

    def cancel(self, job: JobId) -> None:
        """Stop a job soon; its outcome still comes."""
        with self._lock:
            self._send(Cancel(job))

    def progress(self, job: JobId) -> Progress | None:
        """How far a running job is, None when it is not running."""
        with self._lock:
            if job not in self._running or not self._send(AskProgress(job)):
                return None
            reply = self._reply()
            return reply.progress if isinstance(reply, Report) else None

    def events(self) -> list[Outcome]:
        """Outcomes since the last call, without waiting."""
        with self._lock:
            while self._readable(0.0):
                self._receive()
            found = list(self._events)
            self._events.clear()
            return found

    def wait(self, job: JobId, timeout_s: float | None = None) -> Outcome:
        """The outcome of a job, taken out of `events`. Raises: TimeoutError after `timeout_s`, KeyError when there is
        no such job or its outcome has been taken."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                for outcome in self._events:
                    if outcome.id == job:
                        self._events.remove(outcome)
                        return outcome
                if job not in self._running:
                    raise KeyError(f"job {job} is not running and its outcome has been taken")
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"job {job} has not ended within {timeout_s} s")
                if self._readable(0.05 if left is None else min(left, 0.05)):
                    self._receive()

    def restart(self) -> None:
        """Start another process after the death of the last, with the same options and arenas."""
        with self._lock:
            self._end()
            arenas, self._arenas = self._arenas, {}
            self._start()
            for arena, (fd, size, access) in arenas.items():
                self.register_arena(arena, fd, size, access)
                os.close(fd)

    def close(self) -> None:
        """End the process; running jobs end as DriverDied."""
        with self._lock:
            self._end()
            for fd, _, _ in self._arenas.values():
                os.close(fd)
            self._arenas.clear()

    def __enter__(self) -> "DriverHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "omni_flow.data.transfer.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._channel = Channel(ours, decoder)
        self._alive = True
        try:
            self._ask_ready(Configure(self.driver, self._options))
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._channel.sock.close()
        self._process.kill()
        self._process.wait()
        self._died()

    def _ask_ready(self, message: ToWorker, fd: int | None = None) -> None:
        if not self._send(message, fd):
            raise self._death()
        reply = self._reply()
        if isinstance(reply, Refused):
            raise from_code(reply.code, reply.text, "")
        if not isinstance(reply, Ready):
            raise self._death()
        self._endpoint = reply.endpoint

    def _send(self, message: ToWorker, fd: int | None = None) -> bool:
        if self._alive:
            try:
                self._channel.send(message, fd)
                return True
            except (BrokenPipeError, ConnectionResetError):
                self._died()
        self._died()
        return False

    def _reply(self) -> FromWorker | None:
        """The next frame that is no Ended; None at the end of the process or after START_S."""
        end = time.monotonic() + START_S
        while self._readable(end - time.monotonic()):
            frame = self._receive()
            if frame is None or not isinstance(frame, Ended):
                return frame
        return None

    def _receive(self) -> FromWorker | None:
        # A death within a frame is a death.
        try:
            got = self._channel.receive()
        except ConnectionError:
            got = None
        if got is None:
            self._died()
            return None
        frame, fds = got
        close_all(fds)
        if isinstance(frame, Ended):
            self._running.pop(frame.outcome.id, None)
            self._events.append(frame.outcome)
        return frame

    def _readable(self, seconds: float) -> bool:
        if not self._alive:
            return False
        with selectors.DefaultSelector() as ready:
            ready.register(self._channel.sock, selectors.EVENT_READ)
            return bool(ready.select(max(seconds, 0.0)))

    def _died(self) -> None:
        self._alive = False
        for id in self._running:
            self._events.append(Outcome.failed(id, self._death()))
        self._running.clear()

    def _death(self) -> DriverDied:
        code = self._process.poll()
        return DriverDied(f"the process {self.pid} of driver {self.driver!r} has ended (exit {code}); restart it")
