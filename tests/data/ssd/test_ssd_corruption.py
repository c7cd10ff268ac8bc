"""Damaged directories: truncated, bit-flipped and foreign files. A bad record is a miss, never wrong bytes."""

import shutil
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ssd_rig import BLOCK, KIND, OTHER, SEGMENT, assert_never_wrong, config, get, keys, length_of, payload, put

from omni_flow.data.ssd import SsdTier
from omni_flow.data.ssd.format import HEADER_BYTES

RECORDS = 12


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory whose segment has its footer, and one whose writer died: its segment is still open."""
    sealed, opened = tmp_path_factory.mktemp("sealed"), tmp_path_factory.mktemp("opened")
    with SsdTier.open(config(sealed)) as tier:
        put(tier, *range(RECORDS))
        shutil.copytree(sealed, opened, dirs_exist_ok=True)
    return {"sealed": sealed, "opened": opened}


def segment_of(path: Path) -> Path:
    """The file with the records: the oldest."""
    return min(path.glob("*.*"))


def starts() -> list[int]:
    """Where the records begin in the segment."""
    at, out = 0, []
    for number in range(RECORDS):
        out.append(at)
        at += BLOCK * (1 + -(-length_of(number) // BLOCK))
    return [*out, at]


def copy(original: Path, to: Path) -> Path:
    return Path(shutil.copytree(original, to))


@pytest.mark.parametrize("state", ["sealed", "opened"])
def test_an_undamaged_directory_gives_everything_back(originals: dict[str, Path], tmp_path: Path, state: str) -> None:
    with SsdTier.open(config(copy(originals[state], tmp_path / "d"))) as tier:
        assert assert_never_wrong(tier, range(RECORDS)) == list(range(RECORDS))


REGIONS = {
    "magic": 0,
    "version": 8,
    "flags": 10,
    "range": 12,
    "segment": 24,
    "ordinal": 32,
    "namespace": 40,
    "key": 48,
    "length": 80,
    "checksum": 88,
    "crc": 96,
    "rest of the header block": 2000,
    "first payload byte": BLOCK,
    "middle of the payload": BLOCK + 6000,
    "last payload byte": BLOCK + 12287,
}


@pytest.mark.parametrize("state", ["sealed", "opened"])
@pytest.mark.parametrize("region", REGIONS)
def test_a_flip_in_any_region_of_a_record_costs_at_most_misses(
    originals: dict[str, Path], tmp_path: Path, state: str, region: str
) -> None:
    path = copy(originals[state], tmp_path / "d")
    victim, at = 3, starts()[3] + REGIONS[region]
    with open(segment_of(path), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    with SsdTier.open(config(path)) as tier:
        there = assert_never_wrong(tier, range(RECORDS))
        if region == "rest of the header block":
            assert there == list(range(RECORDS))
        elif state == "opened":
            assert there == [0, 1, 2]
        elif "payload" in region:
            # Found when it is read; the record is forgotten and counted, its neighbours are untouched.
            assert there == [n for n in range(RECORDS) if n != victim]
            assert tier.stats().counters.checksum_failures == 1
            assert tier.stats().records == RECORDS - 1
            assert put(tier, victim) == [True]
            assert get(tier, victim) == [payload(victim, length_of(victim))]
        else:
            # A footer names the record, so its own header is not needed.
            assert there == list(range(RECORDS))


def test_a_rotten_record_does_not_spoil_its_neighbours_in_one_read(originals: dict[str, Path], tmp_path: Path) -> None:
    path = copy(originals["sealed"], tmp_path / "d")
    with open(segment_of(path), "r+b") as file:
        file.seek(starts()[3] + BLOCK)
        file.write(b"rot")
    with SsdTier.open(config(path)) as tier:
        expected = [payload(n, length_of(n)) if n != 3 else None for n in range(RECORDS)]
        assert get(tier, *range(RECORDS)) == expected


@pytest.mark.parametrize("state", ["sealed", "opened"])
@pytest.mark.parametrize("cut", [*range(16), -1, -2])
def test_a_truncated_segment_gives_back_only_whole_records(
    originals: dict[str, Path], tmp_path: Path, state: str, cut: int
) -> None:
    path = copy(originals[state], tmp_path / "d")
    file = segment_of(path)
    length = cut * BLOCK if cut >= 0 else SEGMENT + cut * BLOCK
    with open(file, "r+b") as handle:
        handle.truncate(length)
    whole = sum(end <= length for end in starts()[1:])
    with SsdTier.open(config(path)) as tier:
        assert assert_never_wrong(tier, range(RECORDS)) == list(range(whole))
        stats = tier.stats()
        assert stats.records == whole
        assert stats.payload_bytes == sum(map(length_of, range(whole)))
        assert stats.counters.damaged_footers == (state == "sealed")


def test_a_damaged_footer_is_replaced_by_a_walk_and_mended(originals: dict[str, Path], tmp_path: Path) -> None:
    path = copy(originals["sealed"], tmp_path / "d")
    with open(segment_of(path), "r+b") as file:
        file.seek(SEGMENT - BLOCK + 10)
        file.write(b"xx")
    with SsdTier.open(config(path)) as tier:
        assert tier.stats().counters.damaged_footers == 1
        assert assert_never_wrong(tier, range(RECORDS)) == list(range(RECORDS))
    with SsdTier.open(config(path)) as tier:
        assert tier.stats().counters.damaged_footers == 0
        assert assert_never_wrong(tier, range(RECORDS)) == list(range(RECORDS))


@settings(max_examples=60, deadline=None)
@given(
    state=st.sampled_from(["sealed", "opened"]),
    damage=st.lists(st.tuples(st.integers(0, SEGMENT - 1), st.binary(min_size=1, max_size=40)), min_size=1, max_size=6),
)
def test_random_damage_never_gives_wrong_bytes(
    originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, state: str, damage: list[tuple[int, bytes]]
) -> None:
    path = copy(originals[state], tmp_path_factory.mktemp("damage") / "d")
    with open(segment_of(path), "r+b") as file:
        for at, junk in damage:
            file.seek(at)
            file.write(junk[: SEGMENT - at])
    with SsdTier.open(config(path)) as tier:
        there = assert_never_wrong(tier, range(RECORDS))
        assert tier.stats().records == len(there)
        assert tier.stats().payload_bytes == sum(map(length_of, there))
        assert all(put(tier, *range(RECORDS)))
        assert assert_never_wrong(tier, range(RECORDS)) == list(range(RECORDS))
    shutil.rmtree(path)


def patched_version(block: bytearray, crc_at: int) -> bytearray:
    block[8:10] = (9).to_bytes(2, "little")
    block[crc_at : crc_at + 4] = zlib.crc32(block[:crc_at]).to_bytes(4, "little")
    return block


@pytest.mark.parametrize("state", ["sealed", "opened"])
def test_a_segment_of_a_foreign_version_is_skipped_counted_and_reclaimed(
    originals: dict[str, Path], tmp_path: Path, state: str
) -> None:
    path = copy(originals[state], tmp_path / "d")
    file = segment_of(path)
    raw = bytearray(file.read_bytes())
    raw[:BLOCK] = patched_version(raw[:BLOCK], HEADER_BYTES - 4)
    raw[-BLOCK:] = patched_version(raw[-BLOCK:], 40) if state == "sealed" else raw[-BLOCK:]
    file.write_bytes(raw)
    with SsdTier.open(config(path)) as tier:
        stats = tier.stats()
        assert (stats.records, stats.counters.foreign_segments) == (0, 1)
        assert not file.exists()
        assert put(tier, 1) == [True]


def test_records_of_a_foreign_namespace_are_skipped_counted_and_reclaimed(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, 1, 2)
        put(tier, 3, 4, kind=OTHER)
    with SsdTier.open(config(tmp_path, namespaces=frozenset({OTHER.namespace}))) as tier:
        assert tier.stats().counters.foreign_records == 2
        assert assert_never_wrong(tier, range(6)) == [3, 4]
    with SsdTier.open(config(tmp_path, namespaces=frozenset({99}))) as tier:
        assert tier.stats().counters.foreign_records == 4
        assert tier.stats().records == 0
    assert not list(tmp_path.glob("*.seg"))


def test_what_an_earlier_use_of_a_file_left_is_never_taken_for_a_record(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path, cap_bytes=5 * SEGMENT)) as tier:
        for start in range(0, 240, 12):
            put(tier, *range(start, start + 12))
        assert tier.wait_idle(20)
        assert tier.stats().counters.reclaimed_segments > 2
        known = {k.tobytes() for listed, _ in tier.records() for k in listed}
        shutil.copytree(tmp_path, tmp_path.parent / "crashed")
    with SsdTier.open(config(tmp_path.parent / "crashed", cap_bytes=5 * SEGMENT)) as tier:
        assert {k.tobytes() for listed, _ in tier.records() for k in listed} == known
        assert len(assert_never_wrong(tier, range(240))) == len(known)


def test_a_kind_recovered_from_a_footer_is_the_kind_that_was_put(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, 1, kind=KIND)
        put(tier, 2, kind=OTHER)
    with SsdTier.open(config(tmp_path)) as tier:
        assert tier.retire(OTHER.namespace) == 1
        assert tier.contains(keys(1, 2)).tolist() == [True, False]
