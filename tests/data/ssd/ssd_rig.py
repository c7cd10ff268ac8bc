"""What the tests of the SSD tier share: records whose bytes follow from their number, and an `Io` that misbehaves."""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from omni_flow.data.identity import ObjectRange
from omni_flow.data.ssd import Kind, OsIo, SsdConfig, SsdTier, aligned_buffer

KIND = Kind(7, ObjectRange(0, 4, 0, 2, 1))
OTHER = Kind(8, ObjectRange(0, 4))
BLOCK = 4096
SEGMENT = 128 * 1024


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def keys(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32)


def payload(number: int, length: int) -> bytes:
    """Bytes that no other record has at any offset."""
    return np.random.default_rng(number).integers(0, 256, length, np.uint8).tobytes()


def length_of(number: int) -> int:
    """Aligned, odd, tiny, empty and multi-block lengths in turn."""
    return (4096, 5000, 1, 12288, 0, 8192)[number % 6]


def config(path: Path, **changes: object) -> SsdConfig:
    values: dict[str, object] = {
        "path": path,
        "cap_bytes": 2 << 20,
        "segment_bytes": SEGMENT,
        "threads": 2,
        "io_deadline_s": 20.0,
        "first_probe_s": 0.01,
    }
    return SsdConfig(**(values | changes))


def put(tier: SsdTier, *numbers: int, kind: Kind = KIND) -> list[bool]:
    return tier.put(kind, keys(*numbers), [payload(n, length_of(n)) for n in numbers]).stored.tolist()


def get(tier: SsdTier, *numbers: int) -> list[bytes | None]:
    buffers = [bytearray(16384) for _ in numbers]
    lengths = tier.get(keys(*numbers), buffers).lengths.tolist()
    return [bytes(b[:n]) if n >= 0 else None for b, n in zip(buffers, lengths, strict=True)]


def assert_never_wrong(tier: SsdTier, numbers: Sequence[int]) -> list[int]:
    """Reads the records one by one; returns those that are there, and fails on any byte that was not put."""
    there = []
    for number in numbers:
        (found,) = get(tier, number)
        if found is not None:
            assert found == payload(number, length_of(number))
            there.append(number)
    assert tier.check() == []
    return there


def disk_bytes(path: Path) -> int:
    """What `du` says. A file that is renamed between listing and asking is asked again."""
    while True:
        try:
            return path.stat().st_blocks * 512 + sum(entry.stat().st_blocks * 512 for entry in path.iterdir())
        except FileNotFoundError:
            continue


class FaultyIo(OsIo):
    """Real file operations, until a rule says otherwise.

    `rules[op]` is called with the operation's arguments before it happens: it may raise, block, or kill the process.
    """

    def __init__(self) -> None:
        self.rules: dict[str, Callable[..., None]] = {}

    def _before(self, op: str, *arguments: object) -> None:
        if rule := self.rules.get(op):
            rule(*arguments)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._before("open", path, flags)
        return super().open(path, flags, mode)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("preadv", fd, buffers, offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("pwritev", fd, buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._before("fdatasync", fd)
        super().fdatasync(fd)

    def fallocate(self, fd: int, length: int) -> None:
        self._before("fallocate", fd, length)
        super().fallocate(fd, length)

    def truncate(self, fd: int, length: int) -> None:
        self._before("truncate", fd, length)
        super().truncate(fd, length)

    def rename(self, old: str, new: str) -> None:
        self._before("rename", old, new)
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        self._before("unlink", path)
        super().unlink(path)


def failing(number: int) -> Callable[..., None]:
    """A rule that raises."""

    def rule(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return rule


def torn(io: FaultyIo, length: int) -> Callable[..., None]:
    """A rule for `pwritev`: the first `length` bytes reach the disk, then the write fails."""

    def rule(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        write_prefix(fd, buffers, offset, length)
        raise OSError(errno.EIO, "torn")

    return rule


def write_prefix(fd: int, buffers: Sequence[memoryview], offset: int, length: int) -> None:
    """Writes only the first `length` bytes, rounded down to what the file's mode allows."""
    whole = b"".join(buffers)[:length]
    part = aligned_buffer(len(whole))
    part[: len(whole)] = whole
    if len(whole) >= BLOCK:
        os.pwrite(fd, part[: len(whole) // BLOCK * BLOCK], offset)
    rest = len(whole) % BLOCK
    if rest:
        # Less than a block can't go through O_DIRECT: by way of the page cache of a second descriptor.
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), whole[len(whole) - rest :], offset + len(whole) - rest)
            os.fdatasync(file.fileno())


class Clock:
    """Time that passes only while a call stalls, or as told: nothing else is ever late, however busy the machine."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stall:
    """A rule that blocks until `end` is set, while time passes; `begun` is set when the first caller blocks."""

    def __init__(self, clock: Clock) -> None:
        self.begun = threading.Event()
        self.end = threading.Event()
        self._clock = clock

    def __call__(self, *_: object) -> None:
        self.begun.set()
        while not self.end.wait(0.01):
            self._clock.now += 1.0
