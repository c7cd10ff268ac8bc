"""A sick disk: errors, stalls and no room. Requests go on; the tier turns itself off and comes back."""

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from ssd_rig import (
    KIND,
    SEGMENT,
    Clock,
    FaultyIo,
    Stall,
    assert_never_wrong,
    config,
    disk_bytes,
    failing,
    get,
    keys,
    length_of,
    payload,
    put,
    torn,
)

from omni_flow.data.ssd import SsdTier
from omni_flow.data.ssd.metrics import SsdCollector

BATCH = list(range(12))


def open_filled(path: Path, clock: Callable[[], float] = time.monotonic, **changes: object) -> tuple[SsdTier, FaultyIo]:
    io = FaultyIo()
    tier = SsdTier.open(config(path, **changes), io, clock)
    put(tier, *BATCH)
    assert tier.wait_idle(20)
    return tier, io


def test_a_read_error_is_a_miss_and_the_next_reads_go_on(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path)
    with tier:
        io.rules["preadv"] = failing(errno.EAGAIN)
        assert get(tier, 1) == [None]
        io.rules.clear()
        assert assert_never_wrong(tier, BATCH) == BATCH
        assert tier.stats().counters.io_errors == 1


def test_a_bad_sector_is_forgotten(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path)
    with tier:
        io.rules["preadv"] = failing(errno.EIO)
        assert get(tier, 1) == [None]
        io.rules.clear()
        assert assert_never_wrong(tier, BATCH) == [n for n in BATCH if n != 1]


@pytest.mark.parametrize("op", ["preadv", "pwritev"])
def test_errors_in_a_row_turn_the_tier_off_and_a_good_probe_turns_it_on_again(tmp_path: Path, op: str) -> None:
    tier, io = open_filled(tmp_path, errors_to_open=2)
    with tier:
        io.rules[op] = failing(errno.EIO)
        for number in (102, 103):
            assert put(tier, number) == [op == "preadv"]
            assert get(tier, number) == [None]
        assert tier.stats().times_off == 1
        io.rules.clear()
        assert tier.wait_idle(20)
        assert tier.stats().on
        assert put(tier, 200) == [True]
        assert get(tier, 200) == [payload(200, length_of(200))]


def test_while_off_the_tier_answers_at_once_without_touching_the_disk(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path, errors_to_open=1, first_probe_s=1000.0)
    with tier:
        io.rules["preadv"] = failing(errno.EIO)
        get(tier, 1)
        stats = tier.stats()
        assert not stats.on
        assert "EIO" in stats.reason
        touched: list[str] = []
        io.rules = {op: lambda *_, op=op: touched.append(op) for op in ("preadv", "pwritev", "open", "fallocate")}
        assert get(tier, 2, 3) == [None, None]
        assert put(tier, 100) == [False]
        assert touched == []


def test_a_failed_probe_keeps_the_tier_off(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path, errors_to_open=1)
    probes = threading.Semaphore(0)

    def sick(*_: object) -> None:
        probes.release()
        raise OSError(errno.EIO, "sick")

    with tier:
        io.rules = {"preadv": failing(errno.EIO), "open": sick}
        get(tier, 1)
        for _ in range(3):
            assert probes.acquire(timeout=20)
        assert not tier.stats().on
        assert "probe failed" in tier.stats().reason
        io.rules.clear()
        assert tier.wait_idle(20)
        assert tier.stats().times_off == 1


def test_a_stalled_read_is_a_miss_after_its_deadline_and_its_buffer_is_busy_until_it_ends(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path, clock := Clock(), io_deadline_s=0.05, first_probe_s=1e9)
    stall = Stall(clock)
    io.rules["preadv"] = stall
    buffers = [bytearray(16384) for _ in BATCH]
    result = tier.get(keys(*BATCH), buffers)
    assert result.lengths.tolist() == [-1] * len(BATCH)
    assert result.busy.all()
    assert not result.settled.is_set()
    assert tier.stats().counters.stalls == 1
    assert "stalled" in tier.stats().reason
    stall.end.set()
    assert result.settled.wait(20)
    tier.close()


def test_a_stalled_write_is_refused_after_its_deadline_and_never_published(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path, clock := Clock(), io_deadline_s=0.05)
    stall = Stall(clock)
    io.rules["pwritev"] = stall
    changing = bytearray(payload(100, 8192))
    result = tier.put(KIND, keys(100), [changing])
    assert result.stored.tolist() == [False]
    assert result.busy.tolist() == [True]
    changing[:] = bytes(8192)
    io.rules.clear()
    stall.end.set()
    assert result.settled.wait(20)
    clock.now += 1.0
    assert tier.wait_idle(20)
    assert not tier.contains(keys(100))[0]
    assert tier.put(KIND, keys(100), [payload(100, 8192)]).stored.all()
    tier.close()
    with SsdTier.open(config(tmp_path)) as again:
        buffer = bytearray(8192)
        assert again.get(keys(100), [buffer]).lengths.tolist() == [8192]
        assert buffer == payload(100, 8192)


def test_with_every_worker_stuck_further_requests_still_end(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path, clock := Clock(), io_deadline_s=0.05, threads=2, first_probe_s=1e9)
    stall = Stall(clock)
    io.rules["preadv"] = stall
    threads = [threading.Thread(target=get, args=(tier, n)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert get(tier, 1) == [None]
    stall.end.set()
    tier.close()


def test_a_stall_while_making_room_turns_the_tier_off(tmp_path: Path) -> None:
    io, clock = FaultyIo(), Clock()
    stall = Stall(clock)
    io.rules["fallocate"] = stall
    tier = SsdTier.open(config(tmp_path, io_deadline_s=0.05), io, clock)
    assert put(tier, 1) == [False]
    assert not tier.stats().on
    stall.end.set()
    clock.now += 1.0
    assert tier.wait_idle(20)
    assert put(tier, 1) == [True]
    tier.close()


def test_a_torn_write_is_given_up_and_the_tier_goes_on_in_another_segment(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path)
    io.rules["pwritev"] = torn(io, 6000)
    assert put(tier, 100, 101, 102) == [False] * 3
    io.rules.clear()
    assert put(tier, 103) == [True]
    assert tier.wait_idle(20)
    tier.close()
    with SsdTier.open(config(tmp_path)) as again:
        assert assert_never_wrong(again, [*BATCH, *range(100, 104)]) == [*BATCH, 103]


def test_a_footer_that_cannot_be_written_costs_nothing_until_and_after_a_restart(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path, errors_to_open=1000)  # three failed footers in a row would turn the tier off
    io.rules["fdatasync"] = failing(errno.EIO)
    assert all(put(tier, *range(20, 45)))
    assert assert_never_wrong(tier, BATCH) == BATCH
    tier.close()
    with SsdTier.open(config(tmp_path)) as again:
        assert assert_never_wrong(again, [*BATCH, *range(20, 45)]) == [*BATCH, *range(20, 45)]


def test_a_disk_smaller_than_the_cap_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    io = FaultyIo()

    def full(fd: int, length: int) -> None:
        if len(list(tmp_path.glob("*.*"))) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")

    io.rules["fallocate"] = full
    with SsdTier.open(config(tmp_path), io) as tier:
        for start in range(0, 300, 12):
            assert all(put(tier, *range(start, start + 12)))
        assert tier.wait_idle(20)
        assert tier.stats().segments == 6
        assert tier.stats().counters.reclaimed_segments > 2
        assert tier.stats().on
        assert assert_never_wrong(tier, range(300))[-1] == 299


def test_a_disk_without_any_room_turns_the_tier_off_until_there_is_some(tmp_path: Path) -> None:
    io = FaultyIo()
    io.rules["fallocate"] = failing(errno.ENOSPC)
    with SsdTier.open(config(tmp_path), io) as tier:
        assert put(tier, 1) == [False]
        assert tier.stats().times_off >= 1
        assert not list(tmp_path.glob("*.open"))
        io.rules.clear()
        assert tier.wait_idle(20)
        assert put(tier, 1) == [True]


def test_running_out_of_file_descriptors_is_survived(tmp_path: Path) -> None:
    io = FaultyIo()
    with SsdTier.open(config(tmp_path), io) as tier:
        assert tier.wait_idle(20)
        io.rules["open"] = failing(errno.EMFILE)
        stored = [n for start in range(0, 60, 6) for n in range(start, start + 6) if put(tier, n) == [True]]
        assert stored
        io.rules.clear()
        assert tier.wait_idle(20)
        assert put(tier, 100) == [True]
        assert assert_never_wrong(tier, range(60)) == stored


def test_a_real_limit_on_file_size_is_met_with_refusals(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from ssd_rig import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({SEGMENT // 2}, resource.RLIM_INFINITY))\n"
        f"tier = SsdTier.open(config(Path({str(tmp_path / 'd')!r})))\n"
        "stored = put(tier, 1, 2)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "assert tier.wait_idle(20)\n"
        "print(stored, put(tier, 1, 2), tier.stats().counters.io_errors > 0); tier.close()\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout.split() == ["[False,", "False]", "[True,", "True]", "True"]


def test_an_unreadable_segment_at_the_start_is_given_up_and_the_rest_recovered(tmp_path: Path) -> None:
    tier, _ = open_filled(tmp_path)
    put(tier, *range(20, 60))
    tier.close()
    oldest = str(min(tmp_path.glob("*.seg")))
    sick = FaultyIo()

    def bad(path: str, flags: int) -> None:
        if path == oldest:
            raise OSError(errno.EIO, "bad medium")

    sick.rules["open"] = bad
    with SsdTier.open(config(tmp_path), sick) as again:
        there = assert_never_wrong(again, [*BATCH, *range(20, 60)])
        assert 59 in there
        assert 0 not in there
        assert again.stats().counters.io_errors == 1
        assert again.wait_idle(20)
        assert disk_bytes(tmp_path) <= again.stats().disk_bytes


def test_a_sick_disk_shows_in_the_metrics_and_to_whoever_listens(tmp_path: Path) -> None:
    told: list[tuple[bool, str]] = []
    tier, io = open_filled(tmp_path, errors_to_open=1, on_state=lambda on, reason: told.append((on, reason)))
    registry = CollectorRegistry()
    registry.register(SsdCollector({"kv": tier}))
    with tier:
        assert registry.get_sample_value("omni_ssd_on", {"pool": "kv"}) == 1
        io.rules = {"preadv": failing(errno.EIO), "open": failing(errno.EIO)}
        get(tier, 1)
        assert registry.get_sample_value("omni_ssd_on", {"pool": "kv"}) == 0
        assert registry.get_sample_value("omni_ssd_io_errors_total", {"pool": "kv"}) >= 1
        assert registry.get_sample_value("omni_ssd_times_off_total", {"pool": "kv"}) == 1
        io.rules.clear()
        assert tier.wait_idle(20)
    assert [on for on, _ in told] == [False, True]
    assert "EIO" in told[0][1]


def test_closing_with_a_hung_disk_ends(tmp_path: Path) -> None:
    tier, io = open_filled(tmp_path, clock := Clock(), io_deadline_s=0.05)
    stall = Stall(clock)
    io.rules["pwritev"] = stall
    put(tier, 100)
    tier.close()
    assert stall.begun.is_set()
    stall.end.set()
