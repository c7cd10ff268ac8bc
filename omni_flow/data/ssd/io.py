"""The seam to the disk, aligned memory, and the threads that do blocking I/O.

Everything the tier does to files goes through an `Io`, so that tests can make real writes fail, tear and
stall.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from omni_flow.data.ssd.format import BLOCK


class Io(Protocol):
    """File operations, named as in `os`. All raise OSError."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int: ...
    def close(self, fd: int) -> None: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def fdatasync(self, fd: int) -> None: ...
    def fallocate(self, fd: int, length: int) -> None: ...
    def truncate(self, fd: int, length: int) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def unlink(self, path: str) -> None: ...


class OsIo:
    """The real one. `preadv`, `pwritev` and `fdatasync` release the GIL."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fallocate(self, fd: int, length: int) -> None:
        os.posix_fallocate(fd, 0, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)


def read_into(io: Io, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Reads until the buffers are full or the file ends; returns the bytes read."""
    total = sum(len(buffer) for buffer in buffers)
    done = io.preadv(fd, buffers, offset)
    while 0 < done < total and done % BLOCK == 0:
        more = io.preadv(fd, _rest(buffers, done), offset + done)
        if more == 0:
            break
        done += more
    return done


def write_all(io: Io, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes everything or raises OSError; after a short write the next attempt says why."""
    total = sum(len(buffer) for buffer in buffers)
    done = io.pwritev(fd, buffers, offset)
    while done < total:
        if done % BLOCK:
            raise OSError(errno.EIO, f"write of {total} bytes stopped at {done}, within a block")
        more = io.pwritev(fd, _rest(buffers, done), offset + done)
        if more == 0:
            raise OSError(errno.EIO, f"write of {total} bytes stopped at {done}")
        done += more


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(done - len(buffer), 0)
    return rest


def aligned_buffer(length: int) -> memoryview:
    """Returns zeroed writable memory of at least `length` bytes, page-aligned, a multiple of 4 KiB long."""
    return memoryview(mmap.mmap(-1, max(BLOCK, -(-length // BLOCK) * BLOCK)))


def is_aligned(view: memoryview) -> bool:
    """Says whether O_DIRECT may use this memory as it is."""
    if len(view) % BLOCK:
        return False
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0] if len(view) else 0
    return address % BLOCK == 0


class Scratch(threading.local):
    """Aligned memory of the calling thread: `block` for what is read and not wanted, `room` for unaligned payloads."""

    def __init__(self) -> None:
        self.block = aligned_buffer(BLOCK)
        self._room = aligned_buffer(BLOCK)

    def room(self, length: int) -> memoryview:
        """Returns at least `length` bytes with undefined content, valid until the thread asks again."""
        if len(self._room) < length:
            self._room = aligned_buffer(length)
        return self._room


class Workers:
    """Threads that run jobs in order. Daemons: one that hangs in a dead disk must not keep the process alive."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._loop, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job, which must not raise."""
        self._queue.put(job)

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job

    def stop(self, timeout: float) -> bool:
        """Lets queued jobs finish and ends the threads; returns False if one is still busy after `timeout` seconds."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)
