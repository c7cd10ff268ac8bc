"""The SSD tier (L3): an append-only log of checksummed records in a directory of its own.

A library that knows no server; `mover.py` joins it to the memory manager, `metrics.py` to Prometheus. Open `tier.py`
first, then:

    format.py     bytes on disk                       config.py     what a tier is told and tells
    recovery.py   reading a directory back            opening.py    from files to a tier that serves
    segments.py   room in segments (pure)             table.py      what is known of each record (pure)
    keeper.py     sealing, reclaim, probing           carry.py      what reclaim carries over
    writer.py     putting records                     batch.py      I/Os with deadlines
    breaker.py    turning a sick disk off (pure)      directory.py  lock, epoch, file names
    io.py         the seam to the disk                core.py       state under one lock, I/O on records
"""

from omni_flow.data.ssd.config import Counters, SsdConfig, SsdStats
from omni_flow.data.ssd.errors import BadSsdConfig, BufferMismatch, DirectIoUnsupported, DirectoryBusy, SsdError
from omni_flow.data.ssd.format import Kind
from omni_flow.data.ssd.io import Io, OsIo, aligned_buffer
from omni_flow.data.ssd.tier import GetResult, SsdTier
from omni_flow.data.ssd.writer import NO_PLACE, PutResult

__all__ = [
    "NO_PLACE",
    "BadSsdConfig",
    "BufferMismatch",
    "Counters",
    "DirectIoUnsupported",
    "DirectoryBusy",
    "GetResult",
    "Io",
    "Kind",
    "OsIo",
    "PutResult",
    "SsdConfig",
    "SsdError",
    "SsdStats",
    "SsdTier",
    "aligned_buffer",
]
