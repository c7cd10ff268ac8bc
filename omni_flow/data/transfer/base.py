"""The seam between a manager and whatever moves bytes between nodes.

A driver moves lists of spans between a registered arena on this node and one on a peer. It runs inside a worker
process (`worker.py`); the manager holds a `DriverHost` (`host.py`), which has the same verbs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal, NewType

import msgspec
import numpy as np
import numpy.typing as npt

from omni_flow.data.errors import DataError, from_code
from omni_flow.data.transfer.errors import BadJob

ArenaId = NewType("ArenaId", int)
JobId = NewType("JobId", int)
Spans = npt.NDArray[np.uint64]
"""Rows (local offset, remote offset, length), all in bytes."""
Access = Literal["none", "read", "write", "both"]
"""What peers may do with an arena."""


class ArenaPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a registered arena lies in the driver's address space, and what peers may do with it; drivers with
    one-sided access need it."""

    base: int
    size: int
    access: Access


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """How a peer reaches a driver: travels between managers, never to clients.

    `boot` is new with each start, so a stale endpoint is noticed. `secret` proves to the peer's driver that its manager
    handed out the endpoint; it is empty where both sides were given a shared key. `blob` is a driver's own metadata.
    """

    driver: str
    host: str
    port: int
    boot: bytes
    secret: bytes = b""
    arenas: dict[int, ArenaPlace] = {}
    blob: bytes = b""

    def __repr__(self) -> str:
        return f"Endpoint({self.driver} {self.host}:{self.port} boot {self.boot.hex()[:8]})"


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One transfer: `read` fills local spans from the peer, `write` fills the peer's. `timeout_s` counts from its
    start."""

    id: JobId
    direction: Literal["read", "write"]
    peer: Endpoint
    local: ArenaId
    remote: ArenaId
    spans: bytes
    timeout_s: float

    def rows(self) -> Spans:
        """The spans, checked for form. Raises: BadJob."""
        if len(self.spans) % 24 or not self.spans:
            raise BadJob(f"job {self.id} has {len(self.spans)} bytes of spans; a span is three u64")
        rows = np.frombuffer(self.spans, np.uint64).reshape(-1, 3)
        if not rows[:, 2].all() or int(rows.max()) >= 1 << 62:
            raise BadJob(f"job {self.id} has a span of no bytes or beyond 2^62")
        return rows


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The end of a job. Reported once, and only when nothing of the job can touch the local arena any more."""

    id: JobId
    bytes_moved: int
    code: str = ""
    text: str = ""
    retries: int = 0

    @property
    def ok(self) -> bool:
        return not self.code

    def check(self) -> int:
        """Bytes moved; raises the job's error when it failed."""
        if self.code:
            raise from_code(self.code, self.text, "")
        return self.bytes_moved

    @classmethod
    def failed(cls, id: JobId, error: DataError, moved: int = 0, retries: int = 0) -> "Outcome":
        return cls(id, moved, error.code, str(error), retries)


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Acknowledged and total bytes of a running job."""

    done: int
    total: int


Done = Callable[[Outcome], None]


class Driver(ABC):
    """One transport. All methods may be called from one thread; `done` is called from any.

    A driver never touches an arena outside the spans of its jobs, and never calls `done` for a job while one of its
    own threads may still write the job's local spans.

    After a *write* that failed, late bytes may reach the peer's spans until the peer has seen the connection end; so
    managers push by having the target read.
    """

    name: ClassVar[str]

    @abstractmethod
    def register_arena(self, arena: ArenaId, fd: int, size: int, access: Access) -> None:
        """Map `size` bytes of the memory file `fd` (kept by the caller; the driver duplicates what it needs) and open
        it to peers as `access` says. Raises: BadJob when the number is taken or the file is shorter."""

    @abstractmethod
    def endpoint(self) -> Endpoint:
        """How peers reach this driver now; changes with each registered arena."""

    @abstractmethod
    def start(self, job: Job) -> None:
        """Begin a job; its end, good or bad, comes through `done`. Never raises for what is wrong with the job."""

    @abstractmethod
    def cancel(self, job: JobId) -> None:
        """Stop a job soon; it ends as Cancelled unless it has ended already. Unknown jobs are ignored."""

    @abstractmethod
    def progress(self, job: JobId) -> Progress | None:
        """How far a running job is, None when it is not running."""

    @abstractmethod
    def close(self) -> None:
        """End all jobs as Cancelled, close all connections."""
