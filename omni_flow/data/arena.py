"""Arenas: long-lived memory that the manager creates, faults in and hands out once as a file descriptor.

A CPU arena is an anonymous memory file (memfd): it has no name anywhere, so nothing is left behind when the last
process that holds it dies. Everyone else maps it, read-only where the role only reads. torch is imported only when a
tensor is asked for.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from omni_flow.data.errors import BadArgument, OutOfMemory, SystemRefusal
from omni_flow.data.mapping import HUGE, POPULATE_READ, POPULATE_WRITE, address_of, advise, make_huge, map_shared

if TYPE_CHECKING:
    import torch

_STEP: Final = 16 << 20
_CGROUP = "/sys/fs/cgroup"
"""Of this process, where that has a namespace of cgroups, as in a container."""


def available_bytes() -> int:
    """Bytes the system could still give, from /proc/meminfo and the cgroup, files that it keeps in memory and can drop
    among them.

    Raises:
        SystemRefusal: it does not say so.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        with open(f"{_CGROUP}/memory.max", encoding="ascii") as limit:
            text = limit.read().strip()
        if text == "max":
            return free
        with open(f"{_CGROUP}/memory.current", encoding="ascii") as current:
            used = int(current.read())
        with open(f"{_CGROUP}/memory.stat", encoding="ascii") as lines:
            kept = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
        return max(0, min(free, int(text) - used + kept))
    except FileNotFoundError:
        return free
    except OSError as error:
        raise SystemRefusal(
            f"how much memory there is can't be read: {error}", "see the limits of this process"
        ) from error


class Arena:
    """A mapping of an arena in this process. Make it with `create` (the manager) or `attach` (everyone else)."""

    kind = "memfd"

    def __init__(self, name: str, fd: int, size: int, write: bool, page_size: int, huge: bool = False) -> None:
        self.name = name
        self.fd = fd
        self.size = size
        self.writable = write
        self.page_size = page_size
        self._huge = huge
        try:
            self._view = map_shared(fd, size, write, aligned=page_size == HUGE)
        except OSError as error:
            raise OutOfMemory(f"mapping {size} bytes of arena {name}: {error}", "lower its size") from error
        self.array: NDArray[np.uint8] = np.frombuffer(self._view, np.uint8)
        self.populated = threading.Event()

    @classmethod
    def create(cls, name: str, size: int, *, huge: bool = True, populate: str = "now") -> Arena:
        """Make an arena of at least `size` bytes (rounded up to whole pages) with its memory behind it.

        Args:
            huge: use huge pages: reserved ones if enough of them are free, else transparent ones as far as the system
                finds them while faulting in, else ordinary ones.
            populate: `now` (fault in before returning), `background` (in a thread, see `populated`) or `lazy`.

        Raises:
            OutOfMemory: the system does not have that much; the message says how much it has.
        """
        if size <= 0:
            raise BadArgument(f"arena {name} of {size} bytes", "give a size")
        if populate not in ("now", "background", "lazy"):
            raise BadArgument(f"populate={populate!r}", "choose now, background or lazy")
        if huge:
            made = cls._create_huge(name, (size + HUGE - 1) // HUGE * HUGE)
            if made is not None:
                return made
        size = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        there = available_bytes()
        if populate != "lazy" and size > there:
            raise OutOfMemory(f"arena {name} needs {size} bytes, {there} are available", "lower its size")
        fd = os.memfd_create(f"omni-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            arena = cls(name, fd, size, True, mmap.PAGESIZE, huge)
            if populate == "now":
                arena.populate()
        except OutOfMemory:
            os.close(fd)
            raise
        except OSError as error:
            os.close(fd)
            raise OutOfMemory(f"arena {name} of {size} bytes: {error}", "lower its size") from error
        if populate == "background":
            threading.Thread(target=arena.populate, args=(1,), name=f"populate-{name}", daemon=True).start()
        else:
            arena.populated.set()
        return arena

    @classmethod
    def _create_huge(cls, name: str, size: int) -> Arena | None:
        """An arena of huge pages, or None where there are too few. Huge memory files reserve at mapping time."""
        fd = os.memfd_create(f"omni-{name}", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            arena = cls(name, fd, size, True, HUGE)
            arena.populate()
        except (OSError, OutOfMemory):
            os.close(fd)
            return None
        return arena

    @classmethod
    def attach(cls, name: str, fd: int, size: int, *, write: bool, page_size: int = mmap.PAGESIZE) -> Arena:
        """Map an arena that came as a descriptor; takes over the descriptor.

        Raises:
            BadArgument: the file is smaller than said.
            OutOfMemory: the system does not map it.
        """
        have = os.fstat(fd).st_size
        if have < size:
            os.close(fd)
            raise BadArgument(f"arena {name} of {size} bytes came with a file of {have}")
        try:
            return cls(name, fd, size, write, page_size)
        except OutOfMemory:
            os.close(fd)
            raise

    def populate(self, threads: int = 0, upto: int | None = None) -> None:
        """Fault every page in, without touching its content, in steps that let other threads run.

        Args:
            threads: how many at once (0: one per core, at most 8); the kernel clears pages, which one core does slowly.
            upto: only the bytes before it. A client that maps what the manager has populated saves its own page faults.

        Raises:
            OutOfMemory: the memory is not there.
        """
        advise(self.address, self.size, mmap.MADV_HUGEPAGE)  # a wish; kernels without transparent huge pages refuse it
        with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), "populate") as pool:
            for _ in pool.map(self._populate_step, range(0, min(upto or self.size, self.size), _STEP)):
                pass
        if upto is None or upto >= self.size:
            self.populated.set()

    def _populate_step(self, at: int) -> None:
        length = min(_STEP, self.size - at)
        if self._huge and length >= HUGE and not make_huge(self.address + at, length // HUGE * HUGE):
            self._huge = False  # once the system has found none, looking for more costs a lot and gains little
        code = advise(self.address + at, length, POPULATE_WRITE if self.writable else POPULATE_READ)
        if code == errno.EINVAL:  # before Linux 5.14
            self.array[at : at + length : mmap.PAGESIZE] |= 0
        elif code:
            raise OutOfMemory(
                f"arena {self.name}: faulting in {length} of {self.size} bytes failed: {os.strerror(code)}",
                "lower its size or raise the memory limit",
            )

    @property
    def address(self) -> int:
        """Address of the mapping in this process."""
        return address_of(self._view)

    def reader_fd(self) -> int:
        """A new descriptor of the same memory through which it can't be mapped for writing."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise BadArgument(f"{length} bytes at {offset} of arena {self.name} ({self.size} bytes)")

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes of the arena; read-only where the mapping is."""
        self._check(offset, length)
        return self._view[offset : offset + length]

    def numpy(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array over the arena (no copy)."""
        kind = np.dtype(dtype)
        length = kind.itemsize * math.prod(shape)
        self._check(offset, length)
        return np.frombuffer(self._view, np.uint8, length, offset).view(kind).reshape(shape)

    def torch(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the arena (no copy).

        torch knows no read-only tensors: a write through one on a read-only mapping is a segmentation fault, never a
        change of the bytes.
        """
        import warnings

        import torch

        length = dtype.itemsize * math.prod(shape)
        self._check(offset, length)
        if not length:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._view, dtype=dtype, count=length // dtype.itemsize, offset=offset)
        return flat.reshape(shape)

    def dlpack(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> object:
        """A DLPack capsule over the arena (no copy). Needs a writable mapping, as DLPack before 1.0 knows no other."""
        return self.numpy(offset, shape, dtype).__dlpack__()

    def pages(self, page_bytes: int, count: int) -> NDArray[np.uint8]:
        """The first `count` pages as an array (count, page_bytes)."""
        self._check(0, page_bytes * count)
        return self.array[: page_bytes * count].reshape(count, page_bytes)

    def gather(self, page_bytes: int, slots: NDArray[np.integer[Any]], out: NDArray[np.uint8]) -> None:
        """Copy scattered pages into `out`, an array (len(slots), page_bytes). Lets other threads run.

        Raises:
            BadArgument: a slot outside the arena, or an `out` of another shape.
        """
        pages = self._scattered(page_bytes, slots, out)
        np.take(pages, slots, 0, out, mode="clip")  # nothing is clipped; with any other mode numpy copies twice

    def scatter(self, page_bytes: int, slots: NDArray[np.integer[Any]], source: NDArray[np.uint8]) -> None:
        """Copy the rows of `source`, an array (len(slots), page_bytes), into scattered pages.

        Raises:
            BadArgument: a slot outside the arena, or a `source` of another shape.
        """
        self._scattered(page_bytes, slots, source)[slots] = source

    def _scattered(
        self, page_bytes: int, slots: NDArray[np.integer[Any]], rows: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """All whole pages of the arena, (count, page_bytes), of which `slots` name as many as there are `rows`."""
        count = self.size // page_bytes
        if rows.shape != (len(slots), page_bytes):
            raise BadArgument(f"rows of shape {rows.shape} for {len(slots)} pages of {page_bytes} bytes")
        if len(slots) and not (slots.min() >= 0 and slots.max() < count):
            raise BadArgument(f"slots from {slots.min()} to {slots.max()} of arena {self.name} ({count} pages)")
        return self.pages(page_bytes, count)

    def pin_for_cuda(self, register: Callable[[int, int], int]) -> None:
        """Register the memory as pinned with CUDA.

        Args:
            register: `cudaHostRegister` of the caller's runtime, given address and size; returns its error code.

        Raises:
            OutOfMemory: CUDA refuses.
        """
        code = register(self.address, self.size)
        if code:
            raise OutOfMemory(f"cudaHostRegister of {self.size} bytes of arena {self.name}: error {code}")

    def close(self) -> None:
        """Give the descriptor back. The mapping goes with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
