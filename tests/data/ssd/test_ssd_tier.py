"""The SSD tier in health: what it stores, how much it may take, what it gives up when full."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from ssd_rig import (
    BLOCK,
    KIND,
    OTHER,
    SEGMENT,
    FaultyIo,
    assert_never_wrong,
    config,
    disk_bytes,
    get,
    key,
    keys,
    length_of,
    payload,
    put,
)

from omni_flow.data.ssd import (
    NO_PLACE,
    BadSsdConfig,
    BufferMismatch,
    DirectIoUnsupported,
    DirectoryBusy,
    SsdConfig,
    SsdTier,
    aligned_buffer,
)


def test_records_of_every_length_come_back_byte_for_byte(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        assert put(tier, *range(12)) == [True] * 12
        assert get(tier, *range(12)) == [payload(n, length_of(n)) for n in range(12)]
        assert tier.check() == []


def test_aligned_payloads_go_to_disk_and_back_without_a_copy(tmp_path: Path) -> None:
    seen: set[int] = set()
    io = FaultyIo()

    def address(view: memoryview) -> int:
        return np.frombuffer(view, np.uint8).ctypes.data

    def note(fd: int, buffers: list[memoryview], offset: int) -> None:
        seen.update(address(buffer) for buffer in buffers)

    io.rules = {"pwritev": note, "preadv": note}
    with SsdTier.open(config(tmp_path), io) as tier:
        source, target = aligned_buffer(2 * BLOCK), aligned_buffer(2 * BLOCK)
        source[:] = payload(1, 2 * BLOCK)
        tier.put(KIND, keys(1), [source])
        assert tier.get(keys(1), [target]).lengths.tolist() == [2 * BLOCK]
        assert target == source
    assert {address(source), address(target)} <= seen


def test_an_unknown_key_is_a_miss(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, 1)
        assert get(tier, 1, 2, 1)[1] is None
        assert tier.contains(keys(1, 2)).tolist() == [True, False]
        assert (tier.stats().counters.hits, tier.stats().counters.misses) == (2, 1)


def test_the_first_bytes_of_a_key_stay(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, 1)
        written = tier.stats().counters.user_bytes
        assert tier.put(KIND, keys(1, 2, 2), [b"other", b"two", b"zwei"]).stored.all()
        assert get(tier, 1, 2) == [payload(1, length_of(1)), b"two"]
        assert tier.stats().counters.user_bytes == written + 2 * BLOCK


def test_adjacent_records_are_read_with_one_call(tmp_path: Path) -> None:
    io = FaultyIo()
    calls: list[int] = []
    with SsdTier.open(config(tmp_path), io) as tier:
        put(tier, *range(9))
        io.rules = {"preadv": lambda fd, buffers, offset: calls.append(offset)}
        assert get(tier, 4, 3, 2, 1, 0, 8, 7, 6, 5) == [payload(n, length_of(n)) for n in (4, 3, 2, 1, 0, 8, 7, 6, 5)]
    assert len(calls) == 1


def test_many_threads_may_use_one_tier(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path, cap_bytes=8 << 20)) as tier, ThreadPoolExecutor(4) as pool:

        def work(turn: int) -> None:
            mine = [turn % 3 * 10 + i for i in range(10)]
            put(tier, *mine)
            assert get(tier, *mine) == [payload(n, length_of(n)) for n in mine]

        list(pool.map(work, range(24)))
        assert tier.check() == []
        assert tier.stats().records == 30


def test_removed_and_retired_records_are_misses(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, 1, 2, 3)
        put(tier, 4, 5, kind=OTHER)
        assert tier.remove(keys(1, 9)) == 1
        assert tier.retire(OTHER.namespace) == 2
        assert assert_never_wrong(tier, range(6)) == [2, 3]
        assert tier.stats().payload_bytes == length_of(2) + length_of(3)


def test_a_place_names_one_record_and_is_reported_again_by_records(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        result = tier.put(KIND, keys(1, 2, 3), [payload(n, length_of(n)) for n in (1, 2, 3)])
        listed = {k.tobytes(): p for ks, ps in tier.records() for k, p in zip(ks, ps.tolist(), strict=True)}
        assert listed == dict(zip([key(1), key(2), key(3)], result.places.tolist(), strict=True))
        assert len(set(listed.values()) - {NO_PLACE}) == 3


def test_the_cap_holds_for_what_du_sees_while_segments_turn_over(tmp_path: Path) -> None:
    cap = 6 * SEGMENT
    with SsdTier.open(config(tmp_path, cap_bytes=cap)) as tier:
        for start in range(0, 400, 20):
            put(tier, *range(start, start + 20))
            assert disk_bytes(tmp_path) <= tier.stats().disk_bytes
            assert disk_bytes(tmp_path) <= cap
        assert tier.wait_idle(20)
        stats = tier.stats()
        assert stats.counters.reclaimed_segments > 5
        assert assert_never_wrong(tier, range(400))[-1] == 399
        assert tier.stats().counters.checksum_failures == 0


def test_a_full_tier_drops_its_oldest_records_and_says_which(tmp_path: Path) -> None:
    gone: set[bytes] = set()

    def note(what: str, changed: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
        gone.update(k.tobytes() for k in changed if what == "dropped")

    with SsdTier.open(config(tmp_path, cap_bytes=6 * SEGMENT, on_change=note)) as tier:
        for start in range(0, 200, 20):
            put(tier, *range(start, start + 20))
        assert tier.wait_idle(20)
        there = np.flatnonzero(tier.contains(keys(*range(200)))).tolist()
        assert there == list(range(there[0], 200))
        assert gone == {key(n) for n in range(there[0])}


def test_records_in_use_are_carried_over_within_the_write_amplification(tmp_path: Path) -> None:
    moves: dict[bytes, list[int]] = {}

    def note(what: str, changed: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
        if what == "moved":
            for k, place in zip(changed, new.tolist(), strict=True):
                moves.setdefault(k.tobytes(), []).append(place)

    with SsdTier.open(config(tmp_path, cap_bytes=6 * SEGMENT, on_change=note)) as tier:
        put(tier, 0, 1)
        for start in range(2, 302, 10):
            put(tier, *range(start, start + 10))
            assert get(tier, 0, 1) == [payload(n, length_of(n)) for n in (0, 1)]
        assert tier.wait_idle(20)
        assert {key(0), key(1)} == set(moves)
        for listed, places in tier.records():
            for k, place in zip(listed, places.tolist(), strict=True):
                assert place == moves.get(k.tobytes(), [place])[-1]
        assert 1 < tier.stats().write_amplification <= 1.3
        assert tier.check() == []


def test_write_amplification_stays_bounded_when_everything_is_in_use(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path, cap_bytes=6 * SEGMENT, write_amplification=1.2)) as tier:
        for start in range(0, 400, 10):
            put(tier, *range(start, start + 10))
            get(tier, *range(max(0, start - 200), start + 10))
        assert tier.wait_idle(20)
        assert 1.0 < tier.stats().write_amplification <= 1.2


def test_a_closed_tier_recovers_everything_with_exact_accounting(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, *range(60))
        before = tier.stats()
    with SsdTier.open(config(tmp_path)) as tier:
        after = tier.stats()
        assert (
            (after.records, after.payload_bytes)
            == (before.records, before.payload_bytes)
            == (
                60,
                sum(map(length_of, range(60))),
            )
        )
        assert after.epoch == before.epoch + 1
        assert after.counters.recovered_records == 60
        assert tier.wait_idle(20)
        assert disk_bytes(tmp_path) <= tier.stats().disk_bytes
        assert assert_never_wrong(tier, range(60)) == list(range(60))


def test_a_smaller_cap_after_a_restart_drops_the_oldest(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, *range(150))
    with SsdTier.open(config(tmp_path, cap_bytes=5 * SEGMENT)) as tier:
        there = assert_never_wrong(tier, range(150))
        assert 0 < len(there) < 150
        assert there[-1] == 149
        assert put(tier, 200) == [True]
        assert tier.wait_idle(20)
        assert disk_bytes(tmp_path) <= 5 * SEGMENT


def test_another_segment_size_after_a_restart_is_no_obstacle(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, *range(60))
    with SsdTier.open(config(tmp_path, segment_bytes=2 * SEGMENT)) as tier:
        assert assert_never_wrong(tier, range(60)) == list(range(60))
        for start in range(100, 400, 20):
            assert all(put(tier, *range(start, start + 20)))
        assert tier.wait_idle(20)
        assert disk_bytes(tmp_path) <= tier.stats().disk_bytes <= 2 << 20


def test_a_table_that_is_full_refuses_and_counts(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path, max_records=5)) as tier:
        assert put(tier, *range(7)) == [True] * 5 + [False] * 2
        assert tier.stats().counters.refused == 2
        tier.remove(keys(0))
        assert put(tier, 7) == [True]


def test_a_second_process_is_refused_and_told_who_has_the_directory(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from omni_flow.data.ssd import *\n"
        f"try: SsdTier.open(SsdConfig(path=Path({str(tmp_path)!r}), cap_bytes=8 << 20))\n"
        "except DirectoryBusy as error: print(error.code, error)"
    )
    with SsdTier.open(config(tmp_path)):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        with pytest.raises(DirectoryBusy):
            SsdTier.open(config(tmp_path))
    assert f"pid {os.getpid()}" in out
    SsdTier.open(config(tmp_path)).close()


def test_a_file_system_without_direct_io_is_used_buffered_or_refused_as_asked(tmp_path: Path) -> None:
    io = FaultyIo()

    def no_direct(path: str, flags: int) -> None:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")

    io.rules["open"] = no_direct
    with pytest.raises(DirectIoUnsupported):
        SsdTier.open(config(tmp_path, require_direct=True), io)
    with SsdTier.open(config(tmp_path), io) as tier:
        assert not tier.stats().direct
        put(tier, *range(10))
        assert assert_never_wrong(tier, range(10)) == list(range(10))


@pytest.mark.parametrize(
    "changes",
    [{"cap_bytes": 2 * SEGMENT}, {"segment_bytes": 4096}, {"write_amplification": 0.5}, {"threads": 0}],
)
def test_sizes_that_cannot_work_together_are_refused_before_anything_is_written(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(BadSsdConfig):
        SsdTier.open(config(tmp_path / "new", **changes))
    assert not (tmp_path / "new").exists()


def test_buffers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with SsdTier.open(config(tmp_path)) as tier:
        put(tier, 0)
        for call in (
            lambda: tier.put(KIND, keys(1), [bytes(SEGMENT)]),
            lambda: tier.put(KIND, keys(1, 2), [b"one"]),
            lambda: tier.put(KIND, np.zeros((1, 16), np.uint8), [b"one"]),
            lambda: tier.get(keys(0), [bytes(8192)]),
            lambda: tier.get(keys(0), [bytearray(100)]),
        ):
            with pytest.raises(BufferMismatch):
                call()
        assert tier.check() == []


def test_a_closed_tier_answers_with_misses(tmp_path: Path) -> None:
    tier = SsdTier.open(config(tmp_path))
    put(tier, 1)
    tier.close()
    tier.close()
    assert put(tier, 2) == [False]
    assert get(tier, 1) == [None]


def test_a_small_tier_has_segments_that_hold_its_largest_payload(tmp_path: Path) -> None:
    largest = 3 << 20
    with SsdTier.open(SsdConfig(path=tmp_path, cap_bytes=16 << 20, largest=largest)) as tier:
        key = np.ones((1, 32), np.uint8)
        assert tier.put(KIND, key, [bytes(largest)]).stored.all()
        assert tier.get(key, [bytearray(largest)]).lengths.tolist() == [largest]
    with pytest.raises(BadSsdConfig, match="hold no payload"):
        SsdConfig(path=tmp_path, cap_bytes=16 << 20, segment_bytes=1 << 20, largest=largest).segment()
