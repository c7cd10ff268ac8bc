"""Bytes on disk: records and segment footers. Pure; numpy and checksums only.

A segment file is a log of records, then (once it is full) a footer. Everything is a multiple of 4 KiB, so
that O_DIRECT moves payloads straight between the disk and page-aligned memory.

    record   header block (4 KiB, the first 100 bytes used) | payload, zero-padded to 4 KiB
    footer   kinds, then entries, zero-padded to 4 KiB | trailer block (4 KiB), the last one of the file

A record belongs to its segment only when its header carries the segment's id, which is never used twice
(`directory.py`), and the next ordinal; so what an earlier use of the file left behind can't be taken for a
record.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from omni_flow.data.identity import ObjectRange

BLOCK = 4096
VERSION = 1
KEY_BYTES = 32
RECORD_MAGIC = b"OmniRec\n"
FOOTER_MAGIC = b"OmniSeg\n"

Bytes = npt.NDArray[np.uint8]
Entries = npt.NDArray[np.void]
"""Rows of `ENTRY`."""

# magic, version, flags, range, -, segment, ordinal, namespace, key, length, -, checksum; then the crc32 of
# all that.
_HEADER = struct.Struct("<8sHH10sHQQQ32sIIQ")
HEADER_BYTES = _HEADER.size + 4

ENTRY = np.dtype(
    [("key", "u1", 32), ("checksum", "<u8"), ("block", "<u4"), ("length", "<u4"), ("kind", "<u2"), ("pad", "<u2")]
)
_KIND = np.dtype([("namespace", "<u8"), ("range", "V10"), ("pad", "V6")])
_TRAILER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u2"),
        ("kinds", "<u2"),
        ("entries", "<u4"),
        ("segment", "<u8"),
        ("body", "<u8"),
        ("checksum", "<u8"),
        ("crc", "<u4"),
    ]
)


class ForeignVersion(Exception):
    """Written by another version of the format; the number is the argument."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the records of one batch have in common: the namespace's id and the layers and heads they hold.

    Both are attributes and not part of a record's key, which names namespace and range already
    (`identity.object_key`).
    """

    namespace: int
    range: ObjectRange


def blocks_of(length: int) -> int:
    """Returns the blocks that a record with `length` bytes of payload takes, header included."""
    return 1 + -(-length // BLOCK)


def footer_blocks(entries: int, kinds: int) -> int:
    """Returns the blocks of a footer, trailer included."""
    return 1 + -(-(entries * ENTRY.itemsize + kinds * _KIND.itemsize) // BLOCK)


def checksum_of(payload: memoryview) -> int:
    """Returns xxh3_64 of a payload. It finds rot and torn writes, not malice."""
    return xxhash.xxh3_64_intdigest(payload)


@dataclass(frozen=True, slots=True)
class Header:
    """One record as its header describes it."""

    segment: int
    ordinal: int
    kind: Kind
    key: bytes
    length: int
    checksum: int


def write_header(block: memoryview, header: Header) -> None:
    """Fills the head of a block; the rest of it should be zero."""
    where = header.kind.range.pack()
    fixed = (RECORD_MAGIC, VERSION, 0, where, 0, header.segment, header.ordinal, header.kind.namespace)
    raw = _HEADER.pack(*fixed, header.key, header.length, 0, header.checksum)
    block[:HEADER_BYTES] = raw + zlib.crc32(raw).to_bytes(4, "little")


def read_header(block: memoryview) -> Header | None:
    """Returns the record that a block describes, None when it is no sound header.

    Raises:
        ForeignVersion: a sound header of another version.
    """
    raw = bytes(block[: _HEADER.size])
    if raw[:8] != RECORD_MAGIC or zlib.crc32(raw) != int.from_bytes(block[_HEADER.size : HEADER_BYTES], "little"):
        return None
    _, version, _, where, _, segment, ordinal, namespace, key, length, _, checksum = _HEADER.unpack(raw)
    if version != VERSION:
        raise ForeignVersion(version)
    return Header(segment, ordinal, Kind(namespace, ObjectRange.unpack(where)), key, length, checksum)


def write_footer(segment: int, kinds: Sequence[Kind], entries: Entries) -> bytes:
    """Returns the footer of a segment, `footer_blocks` long."""
    table = np.zeros(len(kinds), _KIND)
    for row, kind in zip(table, kinds, strict=True):
        row["namespace"], row["range"] = kind.namespace, np.void(kind.range.pack())
    body = table.tobytes() + entries.tobytes()
    trailer = np.zeros((), _TRAILER)
    trailer["magic"], trailer["version"] = FOOTER_MAGIC, VERSION
    trailer["kinds"], trailer["entries"], trailer["segment"] = len(kinds), len(entries), segment
    trailer["body"], trailer["checksum"] = len(body), xxhash.xxh3_64_intdigest(body)
    raw = trailer.tobytes()[:-4]
    padding = bytes(-len(body) % BLOCK)
    return body + padding + (raw + zlib.crc32(raw).to_bytes(4, "little")).ljust(BLOCK, b"\0")


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last block of a full segment."""

    segment: int
    kinds: int
    entries: int
    body: int
    checksum: int


def read_trailer(block: memoryview) -> Trailer | None:
    """Returns what the last block of a segment says, None when it is no sound trailer.

    Raises:
        ForeignVersion: a sound trailer of another version.
    """
    raw = bytes(block[: _TRAILER.itemsize])
    if raw[:8] != FOOTER_MAGIC or zlib.crc32(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
        return None
    row = np.frombuffer(raw, _TRAILER)[0]
    if int(row["version"]) != VERSION:
        raise ForeignVersion(int(row["version"]))
    found = Trailer(int(row["segment"]), int(row["kinds"]), int(row["entries"]), int(row["body"]), int(row["checksum"]))
    if found.body != found.kinds * _KIND.itemsize + found.entries * ENTRY.itemsize:
        return None
    return found


def read_footer_body(trailer: Trailer, body: memoryview) -> tuple[list[Kind], Entries] | None:
    """Returns kinds and entries of a footer, None when the body does not match its trailer."""
    body = body[: trailer.body]
    if xxhash.xxh3_64_intdigest(body) != trailer.checksum:
        return None
    split = trailer.kinds * _KIND.itemsize
    table = np.frombuffer(body[:split], _KIND)
    kinds = [Kind(int(row["namespace"]), ObjectRange.unpack(row["range"].tobytes())) for row in table]
    return kinds, np.frombuffer(body[split:], ENTRY)
