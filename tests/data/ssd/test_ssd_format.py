"""Bytes on disk: headers and footers say what was written, or nothing."""

import hashlib
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ssd_rig import BLOCK, KIND, OTHER, keys

from omni_flow.data.identity import ObjectRange
from omni_flow.data.ssd.format import (
    ENTRY,
    HEADER_BYTES,
    ForeignVersion,
    Header,
    Kind,
    blocks_of,
    footer_blocks,
    read_footer_body,
    read_header,
    read_trailer,
    write_footer,
    write_header,
)

u16, u32, u64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ranges = st.builds(lambda a, b, c, d, g: ObjectRange(a, a + 1 + b, c, c + 1 + d, g), *[st.integers(0, 9000)] * 4, u16)
headers = st.builds(
    Header, u64, u64, st.builds(Kind, u64, ranges), st.binary(min_size=32, max_size=32), u32, u64
)  # fmt: skip


def block_of(header: Header) -> bytearray:
    block = bytearray(BLOCK)
    write_header(memoryview(block), header)
    return block


@given(headers)
def test_a_header_survives_writing_and_reading(header: Header) -> None:
    assert read_header(memoryview(block_of(header))) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_any_bit_flipped_is_no_header(header: Header, bit: int) -> None:
    block = block_of(header)
    block[bit // 8] ^= 1 << bit % 8
    assert read_header(memoryview(block)) is None


def test_a_sound_header_of_another_version_is_foreign() -> None:
    block = block_of(Header(1, 0, KIND, bytes(32), 5, 6))
    block[8:10] = (2).to_bytes(2, "little")
    block[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(block[: HEADER_BYTES - 4]).to_bytes(4, "little")
    with pytest.raises(ForeignVersion, match="2"):
        read_header(memoryview(block))


def test_the_layout_of_a_record_header_is_the_documented_one() -> None:
    header = Header(0x0102, 3, Kind(4, ObjectRange(5, 6, 7, 8, 9)), b"k" * 32, 10, 11)
    digest = hashlib.sha256(block_of(header)[:HEADER_BYTES]).hexdigest()
    assert digest == "782723d129102ccabe81e24f95cc90b6a16eab6c60e824d6bead7e7d01e2df86"


def footer(count: int) -> tuple[bytes, np.ndarray]:
    entries = np.zeros(count, ENTRY)
    entries["key"] = keys(*range(count)) if count else entries["key"]
    entries["block"] = np.arange(count) * 3
    entries["length"] = 5000
    entries["kind"] = np.arange(count) % 2
    return write_footer(77, [KIND, OTHER], entries), entries


@pytest.mark.parametrize("count", [0, 1, 78, 79, 300])
def test_a_footer_survives_writing_and_reading(count: int) -> None:
    raw, entries = footer(count)
    assert len(raw) == footer_blocks(count, 2) * BLOCK
    trailer = read_trailer(memoryview(raw)[-BLOCK:])
    assert trailer is not None
    assert trailer.segment == 77
    parsed = read_footer_body(trailer, memoryview(raw)[:-BLOCK])
    assert parsed is not None
    assert parsed[0] == [KIND, OTHER]
    assert (parsed[1] == entries).all()


@given(st.data())
def test_a_footer_with_any_bit_flipped_that_means_something_is_no_footer(data: st.DataObject) -> None:
    raw, _ = footer(5)
    changed = bytearray(raw)
    meaningful = list(range(5 * ENTRY.itemsize + 48)) + list(range(len(raw) - BLOCK, len(raw) - BLOCK + 44))
    at = data.draw(st.sampled_from(meaningful))
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    trailer = read_trailer(memoryview(changed)[-BLOCK:])
    assert trailer is None or read_footer_body(trailer, memoryview(changed)[:-BLOCK]) is None


@pytest.mark.parametrize(("length", "blocks"), [(0, 1), (1, 2), (4096, 2), (4097, 3), (2 << 20, 513)])
def test_a_record_takes_its_payload_in_blocks_and_one_for_its_header(length: int, blocks: int) -> None:
    assert blocks_of(length) == blocks
