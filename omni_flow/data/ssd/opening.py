"""From the files of a directory to a tier that serves: recovery with exact accounting, before the first request."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from omni_flow.data.ssd.core import Core
from omni_flow.data.ssd.directory import SegmentFile
from omni_flow.data.ssd.format import BLOCK, Entries, Kind, write_footer
from omni_flow.data.ssd.io import aligned_buffer, write_all
from omni_flow.data.ssd.recovery import Found, newest, read_segment
from omni_flow.data.ssd.segments import FILE_OVERHEAD, State


def recover(core: Core) -> None:
    """Fills the tables from disk. Afterwards every segment is sealed, holds a record, and is within the cap.

    Damaged, foreign and empty segments are deleted; records of foreign namespaces aren't taken in, and go
    with their segment. Each is counted.
    """
    files = core.directory.files()
    with ThreadPoolExecutor(max(1, min(core.config.threads, len(files)))) as pool:
        found = [item for item in pool.map(lambda file: _read(core, file), files) if item is not None]
    room = core.table.room
    kept: list[tuple[Found, Entries]] = []
    for item, entries in reversed(list(zip(found, newest(found), strict=True))):
        core.counters.damaged_footers += item.file.sealed and not item.footer and not item.foreign
        core.counters.cut_segments += item.cut
        core.counters.foreign_segments += item.foreign
        entries = _of_known_namespaces(core, item, entries)
        # Newest first, so that what does not fit the table or the cap is the oldest.
        entries = entries[max(len(entries) - room, 0) :]
        if len(entries) and (item.footer or _seal(core, item)) and _within_cap(core, kept, item):
            room -= len(entries)
            kept.append((item, entries))
        else:
            core.io.close(item.fd)
            core.io.unlink(item.file.path)
    for item, entries in reversed(kept):
        segment = core.segments.add(item.file.ident, item.fd, item.file.path, item.blocks, State.SEALED)
        segment.tail, segment.records = item.end, len(item.entries)
        numbers = np.array([core.kind_number(kind) for kind in item.kinds], np.uint16)
        core.table.add(entries, segment.slot, numbers[entries["kind"]])
        core.counters.recovered_records += len(entries)


def _read(core: Core, file: SegmentFile) -> Found | None:
    try:
        return read_segment(core.directory, core.io, file)
    except OSError as error:
        core.io_failed("read", error)
        core.io.unlink(file.path)
        return None


def _of_known_namespaces(core: Core, item: Found, entries: Entries) -> Entries:
    known = core.config.namespaces
    if known is None or not len(entries):
        return entries
    mine = np.array([kind.namespace in known for kind in item.kinds])[entries["kind"]]
    core.counters.foreign_records += int(np.count_nonzero(~mine))
    known_entries: Entries = entries[mine]
    return known_entries


def _within_cap(core: Core, kept: list[tuple[Found, Entries]], item: Found) -> bool:
    """Whether this segment fits the cap besides the newer ones."""
    blocks = [other.blocks for other, _ in kept] + [item.blocks]
    return core.segments.disk_bytes + sum(n * BLOCK + FILE_OVERHEAD for n in blocks) <= core.config.cap_bytes


def _seal(core: Core, item: Found) -> bool:
    """Ends a segment that lacks a sound footer behind its last sound record; False when the disk refuses."""
    if not len(item.entries):
        return False
    try:
        length = write_sealed(core, item.fd, item.file.ident, item.kinds, item.entries, item.end)
        core.io.truncate(item.fd, length * BLOCK)
        core.io.fdatasync(item.fd)
        path = core.directory.name(item.file.ident, sealed=True)
        core.io.rename(item.file.path, path)
    except OSError as error:
        core.io_failed("write", error)
        return False
    item.file = SegmentFile(item.file.ident, path, True)
    item.blocks = os.fstat(item.fd).st_size // BLOCK
    return True


def write_sealed(core: Core, fd: int, ident: int, kinds: list[Kind], entries: Entries, block: int) -> int:
    """Writes a footer that begins at `block`; returns the first block after it. Raises OSError."""
    raw = write_footer(ident, kinds, entries)
    buffer = aligned_buffer(len(raw))
    buffer[:] = raw
    write_all(core.io, fd, [buffer], block * BLOCK)
    return block + len(raw) // BLOCK
