"""A writer killed at any moment: what was put is found again, nothing else is, and the accounting is exact."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ssd_crash_writer import CAP, RECORDS, record_points
from ssd_rig import assert_never_wrong, config, disk_bytes, length_of, put

from omni_flow.data.ssd import SsdTier

# What `recover` puts to see that the tier goes on.
LATER = range(1_000_000, 1_000_012)
WRITER = Path(__file__).with_name("ssd_crash_writer.py")


def crash(parent: Path, cases: list[str]) -> None:
    subprocess.run([sys.executable, str(WRITER), str(parent), str(RECORDS), *cases], check=True, timeout=100)


def recover(path: Path, records: int = RECORDS + 3) -> tuple[list[int], list[int]]:
    """Opens what a dead writer left; returns the records that are there and those whose put had returned."""
    acked_file = path.with_name(f"{path.name}.acked")
    acked = [int(line) for line in acked_file.read_text().split()] if acked_file.exists() else []
    with SsdTier.open(config(path, cap_bytes=CAP)) as tier:
        stats = tier.stats()
        there = assert_never_wrong(tier, [*range(records), *LATER])
        assert stats.records == len(there) == tier.stats().records
        assert stats.payload_bytes == sum(map(length_of, there))
        assert tier.stats().counters.checksum_failures == 0
        # It goes on as if nothing had happened, within the cap.
        assert all(put(tier, *LATER))
        assert tier.wait_idle(20)
        assert disk_bytes(path) <= tier.stats().disk_bytes <= CAP
    return [number for number in there if number not in LATER], acked


def test_a_writer_killed_at_every_record_boundary_and_within_every_record_loses_only_that_record(
    tmp_path: Path,
) -> None:
    points = record_points(8)
    crash(tmp_path, [f"{point}:bytes:{point}" for point in points])
    for point in points:
        there, acked = recover(tmp_path / str(point))
        # Nothing was reclaimed yet: all that was acknowledged is there, and at most the batch in flight besides.
        assert there[: len(acked)] == acked
        assert len(there) <= len(acked) + 3
        assert there == list(range(len(there)))


def test_a_writer_killed_before_any_file_operation_leaves_a_directory_that_opens(tmp_path: Path) -> None:
    """The operations include making, sealing, renaming and reusing segments: the writer turns its cap over."""
    points = list(range(0, 160, 5))
    crash(tmp_path, [f"{point}:ops:{point}" for point in points])
    for point in points:
        there, acked = recover(tmp_path / str(point))
        # A put that returned is there, unless its segment was given up for newer records.
        lost = set(acked) - set(there)
        assert not lost or max(lost) < min(set(there) & set(acked), default=RECORDS)


def test_a_directory_survives_one_crash_after_another(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for point in (30_000, 150_000, 9_000, 400_000, 77_777):
        crash(tmp_path, [f"d:bytes:{point}"])
        there, _ = recover(tmp_path / "d")
        assert there


def test_a_writer_killed_from_outside_at_full_speed_leaves_nothing_wrong(tmp_path: Path) -> None:
    acked = tmp_path / "d.acked"
    os.mkfifo(acked)
    command = [sys.executable, str(WRITER), str(tmp_path), "1000000", f"d:bytes:{1 << 60}"]
    writer = subprocess.Popen(command, start_new_session=True)
    with open(acked) as lines:
        done = [int(next(lines)) for _ in range(250)]
        # Far from its end, so it is alive; the writer proper is a child of what was started, in one process group.
        os.killpg(writer.pid, signal.SIGKILL)
        done += [int(line) for line in lines if line.endswith("\n")]
    assert writer.wait(20) == -signal.SIGKILL
    acked.unlink()
    there, _ = recover(tmp_path / "d", done[-1] + 4)
    lost = set(done) - set(there)
    assert max(lost, default=-1) < min(set(there) & set(done))


@pytest.mark.long
def test_a_writer_killed_at_every_point_of_a_long_run_leaves_nothing_wrong(tmp_path: Path) -> None:
    cases = [f"b{point}:bytes:{point}" for point in record_points(RECORDS)]
    cases += [f"o{point}:ops:{point}" for point in range(170)]
    for start in range(0, len(cases), 50):
        crash(tmp_path, cases[start : start + 50])
    for case in cases:
        there, acked = recover(tmp_path / case.split(":")[0])
        lost = set(acked) - set(there)
        assert not lost or max(lost) < min(set(there) & set(acked), default=RECORDS)
