"""The fuzz script: what a short run prints, and a long one without divergences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "fuzz.py"


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_a_short_run_is_recorded_with_seed_counts_and_time(tmp_path: Path) -> None:
    record = tmp_path / "fuzz.md"
    done = fuzz("--pairs", "1000", "--seed", "5", "--jobs", "1", "--record", str(record))
    assert done.returncode == 0, done.stdout
    assert "1,000 pairs of random graph and random schedule, 0 divergences" in record.read_text()
    assert "--seed 5" in record.read_text()


def test_a_graph_of_a_run_is_run_alone_again() -> None:
    assert "| pairs | 5 |" in fuzz("--seed", "5", "--graph", "7").stdout


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_sixty_thousand_pairs_agree() -> None:
    done = fuzz("--pairs", "60000", "--seed", "31", "--jobs", "2")
    assert done.returncode == 0, done.stdout
