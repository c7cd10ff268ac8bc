"""What a tier is told, and what it tells."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omni_flow.data.ssd.errors import BadSsdConfig
from omni_flow.data.ssd.format import BLOCK, Bytes, footer_blocks
from omni_flow.data.ssd.segments import FILE_OVERHEAD
from omni_flow.data.ssd.table import NO_SLOT

Places = npt.NDArray[np.uint64]
"""Where a record lies, as an opaque number that is unique while the process lives."""

OnChange = Callable[[str, Bytes, Places, Places], None]
"""Told of what the tier does by itself: ("moved", keys, old places, new places) and ("dropped", keys, old
places, old
places). Called from threads of the tier, without its lock; must not raise."""

OnState = Callable[[bool, str], None]
"""Told when the tier turns itself off (False and the reason) and when it is on again. Like `OnChange`."""


def _ignore_state(on: bool, reason: str) -> None:
    return None


def _ignore(what: str, keys: Bytes, old: Places, new: Places) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdConfig:
    """One tier in one directory.

    Args:
        path: the directory; nobody else may use it.
        cap_bytes: most bytes on disk, everything included.
        segment_bytes: size of a segment file; 0 takes a 32nd of the cap, within 1 MiB and 1 GiB, and more where
            `largest` needs it.
        largest: bytes of the largest payload, which a segment must hold.
        max_records: most records, which bounds the memory (about 75 bytes a record); 0 takes one for each 8
            KiB of the
            cap, 2 million at most.
        threads: workers for I/O, 4 to 8 for a fast disk.
        write_amplification: most bytes written for each byte put; above 1, reclaim may carry records in use
            over.
        io_deadline_s: seconds one I/O may take before the tier turns itself off.
        errors_to_open, first_probe_s: see `Breaker`.
        require_direct: refuse a file system without O_DIRECT instead of using buffered I/O.
        namespaces: ids of the namespaces whose records are worth recovering; None takes all.
        on_change, on_state: see `OnChange`, `OnState`.
    """

    path: Path
    cap_bytes: int
    segment_bytes: int = 0
    largest: int = 0
    max_records: int = 0
    threads: int = 4
    write_amplification: float = 1.3
    io_deadline_s: float = 5.0
    errors_to_open: int = 3
    first_probe_s: float = 1.0
    require_direct: bool = False
    namespaces: frozenset[int] | None = None
    on_change: OnChange = field(default=_ignore)
    on_state: OnState = field(default=_ignore_state)

    def segment(self) -> int:
        """Returns the size of a segment file.

        Raises:
            BadSsdConfig: the sizes can't work together.
        """
        needed = (1 + footer_blocks(1, 1) + -(-self.largest // BLOCK)) * BLOCK
        size = self.segment_bytes or max(min(max(self.cap_bytes // 32, 1 << 20), 1 << 30), needed)
        size = size // BLOCK * BLOCK
        if size < needed:
            raise BadSsdConfig(
                f"segments of {size} bytes hold no payload of {self.largest}", f"give at least {needed} bytes"
            )
        if size < 4 * BLOCK:
            raise BadSsdConfig(f"segments of {size} bytes hold no record", "give at least 16 KiB")
        fit = (self.cap_bytes - FILE_OVERHEAD) // (size + FILE_OVERHEAD)
        if fit < 4:
            raise BadSsdConfig(
                f"a cap of {self.cap_bytes} bytes holds {max(fit, 0)} segments of {size} bytes, 4 are needed",
                f"raise the cap to {4 * (size + FILE_OVERHEAD) + FILE_OVERHEAD} bytes or take smaller segments",
            )
        if fit > NO_SLOT:
            raise BadSsdConfig(
                f"{fit} segments are too many", f"take segments of {self.cap_bytes // NO_SLOT} bytes or more"
            )
        if self.write_amplification < 1 or self.threads < 1 or self.io_deadline_s <= 0:
            raise BadSsdConfig(
                f"amplification {self.write_amplification}, {self.threads} threads, deadline {self.io_deadline_s} s",
                "give at least 1, at least 1 and more than 0",
            )
        return size

    def records(self) -> int:
        """Returns the most records."""
        return self.max_records or min(max(self.cap_bytes // 8192, 1024), 1 << 21)


@dataclass(slots=True)
class Counters:
    """What happened since the tier was opened."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    user_bytes: int = 0
    moved_bytes: int = 0
    moved_records: int = 0
    reclaimed_segments: int = 0
    reclaimed_records: int = 0
    checksum_failures: int = 0
    io_errors: int = 0
    stalls: int = 0
    foreign_records: int = 0
    foreign_segments: int = 0
    recovered_records: int = 0
    damaged_footers: int = 0
    cut_segments: int = 0


@dataclass(frozen=True, slots=True)
class SsdStats:
    """A snapshot; all bytes are exact."""

    on: bool
    reason: str
    direct: bool
    epoch: int
    records: int
    payload_bytes: int
    disk_bytes: int
    cap_bytes: int
    segments: int
    memory_bytes: int
    times_off: int
    counters: Counters

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte put."""
        user = self.counters.user_bytes
        return (user + self.counters.moved_bytes) / user if user else 1.0
