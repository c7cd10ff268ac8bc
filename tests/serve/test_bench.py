"""The scripts of `bench/` that measure and soak the server run, and print what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
KEYS = {
    "gateway_overhead_ms",
    "gateway_p99_c64_ms",
    "requests_per_s",
    "sse_events_per_s",
    "sse_first_byte_ms",
    "idle_sse_2000_mb",
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def test_the_bench_prints_one_object_of_numbers() -> None:
    command = [sys.executable, str(BENCH / "serve.py"), "--quick", "--json", "--no-ray"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    figures = json.loads(done.stdout)
    assert set(figures) >= KEYS
    assert all(isinstance(value, (int, float)) for value in figures.values())


def test_a_short_soak_hangs_nowhere_and_leaves_nothing() -> None:
    command = [sys.executable, str(BENCH / "soak_serve.py"), "--minutes", "0.5", "--callers", "4", "--kill-every", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = json.loads(done.stdout)
    assert found["hung"] == 0
    assert not any(found["left"].values())
    assert found["counts"]["kills"] >= 1
    assert done.returncode == 0, found
