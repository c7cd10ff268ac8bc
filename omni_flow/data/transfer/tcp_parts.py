"""Settings, running jobs and peers of the tcp driver."""

import contextlib
import ipaddress
import os
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from omni_flow.data.errors import DataError
from omni_flow.data.transfer.arenas import Arena
from omni_flow.data.transfer.base import Endpoint, Job
from omni_flow.data.transfer.chunks import CHUNK_BYTES, MAX_CHUNK_BYTES, Chunks
from omni_flow.data.transfer.errors import BadJob

LEAST_KEY = 16
"""Bytes that a secret of all nodes has at least."""


class Kickable(Protocol):
    """What a job knows of the stream that has chunks of it under way."""

    thread: threading.Thread

    def kick(self) -> None:
        """End the stream's connection now: whatever waits on it wakes."""


class TcpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the tcp driver.

    Without `key` the driver binds and connects on the loopback only, and each endpoint carries a secret of its own.
    `advertise` is the address peers shall use when it is not `host`. `attempts`: broken or refused connections in a row
    of one stream before its jobs fail. `in_flight_bytes` bounds what is requested and not yet acknowledged, over all
    peers.
    """

    host: str = "127.0.0.1"
    port: int = 0
    key: bytes = b""
    advertise: str = ""
    streams: int = max(2, min(4, (os.cpu_count() or 1) // 2))
    depth: int = 2
    chunk_bytes: int = CHUNK_BYTES
    in_flight_bytes: int = 64 << 20
    connections: int = 1024
    attempts: int = 7
    connect_s: float = 5.0
    stall_s: float = 30.0
    idle_s: float = 60.0

    def check(self) -> None:
        """Raises: BadJob, naming the setting."""
        if not self.key and not is_loopback(self.host):
            raise BadJob(f"host {self.host} is not a loopback address; set a shared key to listen there")
        if self.key and len(self.key) < LEAST_KEY:
            raise BadJob(f"the shared key has fewer than {LEAST_KEY} bytes")
        if not 4096 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise BadJob(f"chunk_bytes {self.chunk_bytes} is not between 4096 and {MAX_CHUNK_BYTES}")
        if self.in_flight_bytes < self.chunk_bytes:
            raise BadJob(f"in_flight_bytes {self.in_flight_bytes} is below one chunk of {self.chunk_bytes}")
        if min(self.streams, self.depth, self.attempts, self.connections) < 1:
            raise BadJob("streams, depth, attempts and connections are at least 1")


def is_loopback(host: str) -> bool:
    """Whether `host` is a numeric loopback address or `localhost`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@dataclass(slots=True, eq=False)
class Task:
    """A running job. Fields are guarded by the driver's lock."""

    job: Job
    arena: Arena
    peer: "Peer"
    chunks: Chunks
    total: int
    deadline: float
    done: int = 0
    under_way: int = 0
    retries: int = 0
    mismatches: int = 0
    error: DataError | None = None
    holders: Counter["Kickable"] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Peer:
    """A peer's queue of jobs with chunks to go, and its streams."""

    endpoint: Endpoint
    waiting: deque[Task] = field(default_factory=deque)
    streams: set["Kickable"] = field(default_factory=set)
