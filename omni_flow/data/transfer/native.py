"""What the drivers of third-party transports share: one-sided access to registered memory, batch by batch.

The transport knows neither bounds nor rights, so they are checked here, on the side that asks, from the endpoint that
the peer handed out. Nor does it know a key: such a driver is for a network that all nodes trust. A transport that does
not let go of a job in time ends the process: that, and nothing less, stops it from writing to the arena.
"""

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import DataError
from omni_flow.data.transfer.arenas import Arena, ArenaMap
from omni_flow.data.transfer.base import (
    Access,
    ArenaId,
    ArenaPlace,
    Done,
    Driver,
    Endpoint,
    Job,
    JobId,
    Outcome,
    Progress,
    Spans,
)
from omni_flow.data.transfer.errors import (
    AccessDenied,
    BadJob,
    Cancelled,
    DeadlineExceeded,
    OutOfBounds,
    UnknownArena,
)

_BATCH_BYTES: Final = 16 << 20
_BATCH_SPANS: Final = 256
_GRACE_S: Final = 15.0
_THREADS: Final = 8
STUCK: Final = 75
"""Exit status of a process whose transport did not let go of a job."""

Addresses = NDArray[np.uint64]


class NativeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a third-party driver. `trusted_network` allows a host that is not on the loopback: these transports
    check no key."""

    host: str = "127.0.0.1"
    trusted_network: bool = False

    def check(self) -> None:
        """Raises: BadJob."""
        if not self.trusted_network and not self.host.startswith("127.") and self.host not in ("localhost", "::1"):
            raise BadJob(f"host {self.host} is not on the loopback; set trusted_network if all of its network may read")


@dataclass(slots=True)
class Task:
    """A running job."""

    job: Job
    rows: Spans
    local: Arena
    remote: ArenaPlace
    deadline: float
    total: int
    done: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def left(self) -> float:
        """Seconds to the deadline. Raises: Cancelled, DeadlineExceeded."""
        if self.stop.is_set():
            raise Cancelled(f"job {self.job.id} was cancelled at {self.done} of {self.total} bytes")
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"job {self.job.id} had {self.job.timeout_s} s and moved {self.done} of {self.total} bytes"
            )
        return left


class NativeDriver(Driver):
    """A driver over a transport that moves lists of addresses. Subclasses give `_attach`, `_metadata` and `_move`."""

    def __init__(self, options: NativeOptions, done: Done) -> None:
        options.check()
        self.options = options
        self.boot = os.urandom(16)
        self._done = done
        self._arenas = ArenaMap()
        self._places: dict[int, ArenaPlace] = {}
        self._tasks: dict[JobId, Task] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"transfer-{self.name}")
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_deadlines, name="transfer-watch", daemon=True)
        self._watch.start()

    @abstractmethod
    def _attach(self, base: int, size: int) -> None:
        """Make memory known to the transport. Raises: NativeFailure."""

    @abstractmethod
    def _metadata(self) -> tuple[str, int, bytes]:
        """Host, port and blob of the endpoint."""

    @abstractmethod
    def _move(
        self,
        direction: Literal["read", "write"],
        peer: Endpoint,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        task: Task,
    ) -> None:
        """Move one batch and return when it is over and nothing of it can touch memory any more; calls `task.left()`
        while it waits. Raises: DataError."""

    def register_arena(self, arena: ArenaId, fd: int, size: int, access: Access) -> None:
        made = self._arenas.add(arena, fd, size, access)
        base = np.frombuffer(made.view, np.uint8).ctypes.data
        self._attach(base, size)
        self._places[arena] = ArenaPlace(base, size, access)

    def endpoint(self) -> Endpoint:
        host, port, blob = self._metadata()
        return Endpoint(self.name, host, port, self.boot, b"", dict(self._places), blob)

    def start(self, job: Job) -> None:
        try:
            task = self._prepare(job)
        except DataError as error:
            self._done(Outcome.failed(job.id, error))
            return
        with self._lock:
            self._tasks[job.id] = task
        self._threads.submit(self._run, task).add_done_callback(_defect)

    def cancel(self, job: JobId) -> None:
        with self._lock:
            task = self._tasks.get(job)
        if task:
            task.stop.set()

    def progress(self, job: JobId) -> Progress | None:
        with self._lock:
            task = self._tasks.get(job)
            return Progress(task.done, task.total) if task else None

    def close(self) -> None:
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            task.stop.set()
        self._threads.shutdown(wait=True)
        self._closing.set()
        self._watch.join()

    def _prepare(self, job: Job) -> Task:
        rows = job.rows()
        if job.peer.driver != self.name:
            raise BadJob(f"job {job.id}: endpoint of driver {job.peer.driver!r} given to {self.name!r}")
        local = self._arenas.local(job.local, job.direction)
        local.check_rows(rows[:, 0], rows[:, 2])
        remote = job.peer.arenas.get(job.remote)
        if remote is None:
            raise UnknownArena(f"arena {job.remote} is not registered on the peer")
        if remote.access not in (job.direction, "both"):
            raise AccessDenied(f"arena {job.remote} of the peer is registered for {remote.access!r}")
        if int((rows[:, 1] + rows[:, 2]).max()) > remote.size:
            raise OutOfBounds(f"job {job.id} leaves arena {job.remote} of {remote.size} bytes")
        return Task(job, rows, local, remote, time.monotonic() + job.timeout_s, int(rows[:, 2].sum()))

    def _run(self, task: Task) -> None:
        try:
            for batch in _batches(task.rows):
                task.left()
                local = batch[:, 0] + np.uint64(self._places[task.local.id].base)
                remote = batch[:, 1] + np.uint64(task.remote.base)
                self._move(task.job.direction, task.job.peer, local, remote, batch[:, 2], task)
                task.done += int(batch[:, 2].sum())
            outcome = Outcome(task.job.id, task.done)
        except DataError as error:
            outcome = Outcome.failed(task.job.id, error, task.done)
        with self._lock:
            del self._tasks[task.job.id]
        self._done(outcome)

    def _watch_deadlines(self) -> None:
        """End the process when the transport holds a job long past its time."""
        while not self._closing.wait(1.0):
            now = time.monotonic()
            with self._lock:
                stuck = [task for task in self._tasks.values() if task.deadline + _GRACE_S < now]
            if stuck:
                os._exit(STUCK)


def _batches(rows: Spans) -> Iterator[Spans]:
    """Consecutive rows of at most `_BATCH_SPANS` and, unless one alone is larger, `_BATCH_BYTES`."""
    start, size = 0, 0
    for at, length in enumerate(rows[:, 2].tolist()):
        if at > start and (size + length > _BATCH_BYTES or at - start == _BATCH_SPANS):
            yield rows[start:at]
            start, size = at, 0
        size += length
    yield rows[start:]


def _defect(future: "object") -> None:
    """A defect in a job's thread must end the process, as in any other thread."""
    error = future.exception()  # type: ignore[attr-defined]
    if error is not None:
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
