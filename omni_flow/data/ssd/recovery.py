"""Reads a directory back after a restart: footers of full segments, records of open ones.

Footers are believed when their checksum holds; the payloads they name are checked when they are read. An open
segment is walked record by record, payloads included, and cut at the first one that is torn, rotten, out of
order or left over from an earlier use of the file. So is a full one whose footer is damaged.
"""

import os
from dataclasses import dataclass, field

import numpy as np

from omni_flow.data.ssd.directory import SegmentDirectory, SegmentFile
from omni_flow.data.ssd.format import (
    BLOCK,
    ENTRY,
    Entries,
    ForeignVersion,
    Kind,
    blocks_of,
    checksum_of,
    read_footer_body,
    read_header,
    read_trailer,
)
from omni_flow.data.ssd.io import Io, aligned_buffer, read_into

_WINDOW = 8 << 20


@dataclass(slots=True)
class Found:
    """What one segment file holds. `entries["kind"]` indexes `kinds`; `end` is the first block after its records."""

    file: SegmentFile
    fd: int
    blocks: int
    kinds: list[Kind] = field(default_factory=list)
    entries: Entries = field(default_factory=lambda: np.zeros(0, ENTRY))
    end: int = 0
    footer: bool = False
    foreign: bool = False
    cut: bool = False


def read_segment(directory: SegmentDirectory, io: Io, file: SegmentFile) -> Found:
    """Returns the content of a segment file. The caller owns `fd`.

    Raises:
        OSError: the file can't be opened or read.
    """
    fd = directory.open(file.path)
    try:
        found = Found(file, fd, os.fstat(fd).st_size // BLOCK)
        try:
            if not (file.sealed and _by_footer(io, found)):
                _by_headers(io, found)
        except ForeignVersion:
            found.foreign = True
    except BaseException:
        io.close(fd)
        raise
    return found


def _by_footer(io: Io, found: Found) -> bool:
    if found.blocks == 0:
        return False
    last = aligned_buffer(BLOCK)
    if read_into(io, found.fd, [last], (found.blocks - 1) * BLOCK) != BLOCK:
        return False
    trailer = read_trailer(last)
    if trailer is None or trailer.segment != found.file.ident:
        return False
    length = -(-trailer.body // BLOCK)
    start = found.blocks - 1 - length
    if start < 0:
        return False
    body = aligned_buffer(length * BLOCK)
    if length and read_into(io, found.fd, [body], start * BLOCK) != len(body):
        return False
    parsed = read_footer_body(trailer, body)
    if parsed is None:
        return False
    kinds, entries = parsed
    ends = entries["block"].astype(np.int64) + 1 + -(-entries["length"].astype(np.int64) // BLOCK)
    if len(entries) and (int(ends.max()) > start or int(entries["kind"].max()) >= len(kinds)):
        return False
    found.kinds, found.entries, found.footer = kinds, entries, True
    found.end = int(ends.max()) if len(entries) else 0
    return True


def _by_headers(io: Io, found: Found) -> None:
    rows: list[tuple[bytes, int, int, int, int]] = []
    numbers: dict[Kind, int] = {}
    window, start, filled = aligned_buffer(_WINDOW), 0, 0
    block = 0
    while block < found.blocks:
        at = (block - start) * BLOCK
        if at + BLOCK > filled:
            start, filled, at = block, read_into(io, found.fd, [window], block * BLOCK), 0
            if filled < BLOCK:
                break
        header = read_header(window[at : at + BLOCK])
        if header is None or header.segment != found.file.ident or header.ordinal != len(rows):
            # Anything else here is what an earlier use of the file left.
            found.cut = header is not None and header.segment == found.file.ident
            break
        need = blocks_of(header.length)
        if block + need > found.blocks:
            found.cut = True
            break
        if at + need * BLOCK > filled:
            if need * BLOCK > len(window):
                window = aligned_buffer(need * BLOCK)
            start, filled, at = block, read_into(io, found.fd, [window], block * BLOCK), 0
        payload = window[at + BLOCK : at + BLOCK + header.length]
        if len(payload) < header.length or at + need * BLOCK > filled or checksum_of(payload) != header.checksum:
            found.cut = True
            break
        kind = numbers.setdefault(header.kind, len(numbers))
        rows.append((header.key, header.checksum, block, header.length, kind))
        block += need
    found.kinds, found.end = list(numbers), block
    entries = np.zeros(len(rows), ENTRY)
    if rows:
        keys, checksums, blocks, lengths, kinds = zip(*rows, strict=True)
        entries["key"] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        entries["checksum"], entries["block"], entries["length"], entries["kind"] = checksums, blocks, lengths, kinds
    found.entries = entries


def newest(found: list[Found]) -> list[Entries]:
    """Returns, for segments given oldest first, the entries of each that no later record of the same key replaces."""
    if not found:
        return []
    sizes = [len(item.entries) for item in found]
    # Keys are digests: only those that share their first word can be equal, and mostly none do.
    heads = np.concatenate([item.entries["key"][:, :8] for item in found])
    # Concatenation keeps the strides of arrays with a single row.
    word = np.ascontiguousarray(heads).view(np.uint64).ravel()
    ordered = np.sort(word)
    shared = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    keep = np.ones(len(word), np.bool_)
    starts = np.cumsum(sizes) - sizes
    last: dict[bytes, int] = {}
    suspects = np.flatnonzero(np.isin(word, shared)) if len(shared) else np.zeros(0, np.intp)
    segment = np.searchsorted(starts, suspects, side="right") - 1
    rows = [found[s].entries[at - starts[s]] for s, at in zip(segment.tolist(), suspects.tolist(), strict=True)]
    ages = [(s, int(row["block"]), at) for s, row, at in zip(segment.tolist(), rows, suspects.tolist(), strict=True)]
    for (_, _, at), row in sorted(zip(ages, rows, strict=True), key=lambda pair: pair[0]):
        key = row["key"].tobytes()
        if key in last:
            keep[last[key]] = False
        last[key] = at
    edges = np.cumsum(sizes)[:-1]
    return [item.entries[mask] for item, mask in zip(found, np.split(keep, edges), strict=True)]
