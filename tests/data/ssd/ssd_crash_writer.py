"""Writes to a tier and dies at a given point. Run by `test_ssd_crash.py`; imports once, then forks for each point.

    python ssd_crash_writer.py PARENT RECORDS CASE...

CASE = NAME:bytes:N dies when N bytes were written to segments, NAME:ops:N before file operation N. Each case uses the
directory PARENT/NAME and writes the numbers of the records whose put returned to PARENT/NAME.acked.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ssd_rig import BLOCK, FaultyIo, config, length_of, put, write_prefix

from omni_flow.data.ssd import SsdTier

RECORDS = 90
CAP = 6 * 128 * 1024


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fatal(FaultyIo):
    """Kills its process at the point given."""

    def __init__(self, unit: str, point: int) -> None:
        super().__init__()
        self._left = point
        if unit == "bytes":
            self.rules["pwritev"] = self._count_bytes
        else:
            for op in ("open", "pwritev", "preadv", "fdatasync", "fallocate", "truncate", "rename", "unlink"):
                self.rules[op] = self._count_ops

    def _count_ops(self, *_: object) -> None:
        if self._left == 0:
            die()
        self._left -= 1

    def _count_bytes(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        length = sum(map(len, buffers))
        if self._left < length:
            write_prefix(fd, buffers, offset, self._left)
            die()
        self._left -= length


def run(path: Path, records: int, unit: str, point: int) -> None:
    """Puts single records and small batches until it is killed, or is done."""
    acked = os.open(f"{path}.acked", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    tier = SsdTier.open(config(path, cap_bytes=CAP, threads=1), Fatal(unit, point))
    number = 0
    while number < records:
        batch = range(number, number + 1 + number % 3)
        stored = put(tier, *batch)
        os.write(acked, "".join(f"{n}\n" for n, ok in zip(batch, stored, strict=True) if ok).encode())
        number += len(batch)
    tier.close()


def record_points(records: int) -> list[int]:
    """Bytes written at every record boundary, in the middle of every header block, and in every payload."""
    at, points = 0, []
    for number in range(records):
        blocks = 1 + -(-length_of(number) // BLOCK)
        points += [at, at + 50, at + 2048, at + BLOCK]
        if blocks > 1:
            points += [at + BLOCK + 100, at + (blocks - 1) * BLOCK, at + blocks * BLOCK - 8]
        at += blocks * BLOCK
    return sorted(set(points))


if __name__ == "__main__":
    for case in sys.argv[3:]:
        name, unit, point = case.split(":")
        child = os.fork()
        if not child:
            run(Path(sys.argv[1]) / name, int(sys.argv[2]), unit, int(point))
            os._exit(0)
        os.waitpid(child, 0)
