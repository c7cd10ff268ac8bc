"""The benches of the engine run on a CPU, and print what they promise. Their numbers mean nothing here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
FIGURES = {
    *(f"ratio_to_sglang.{what}_{batch}" for what in ("prefill", "decode") for batch in (1, 16, 64)),
    "ttft_l1_ratio",
    "ttft_l2_ratio",
    "ttft_l3_ratio",
    "ttft_l2_over_recompute",
    "ttft_l1_streamed_ms",
    "pd_extra_ms",
    "pd_gap_ms",
    "pd_computed_tokens",
    "second_role_gib",
    "second_role_weight_bytes",
    "tail_extend_ms",
    "turns_ratio",
}
STEPS = "warm,equality,cached,roles,1,16,64,turns,tiers"
"""All that have a figure in `FIGURES`, as `compute.py` runs them by itself."""
TINY_PAGE = 4
"""Tokens of a page of `compute.py --tiny`."""
OF_A_TIME = "killed engine: pages and references gone within 1 s"
"""The check that a busy machine may fail."""
ANSWER = """
import os, subprocess
from answer import keep_stdout, plain_numbers
answer = keep_stdout()
print("of this process")
os.write(1, b"of a library in it")
subprocess.run(["echo", "of a process that it started"], check=True)
print(plain_numbers({"here": 1.5, "nowhere": float("nan"), "endless": float("inf")}), file=answer)
"""


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What stands on stdout, which is one JSON object."""
    assert len(done.stdout.splitlines()) == 1, done.stdout
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_an_answer_has_stdout_for_itself_and_names_what_is_no_number() -> None:
    command = [sys.executable, "-c", ANSWER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=BENCH / "gpu")
    assert done.stdout == '{"here": 1.5}\n'
    assert "nowhere is left out, it is nan" in done.stderr
    assert "endless is left out, it is inf" in done.stderr
    assert done.stderr.count("of ") == 3


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_gpu_bench_prints_every_figure_as_a_number_also_when_a_step_fails() -> None:
    done = run("gpu/compute.py", "--tiny", "--json", "--pairs", "1", "--steps", f"{STEPS},unheard_of")
    assert done.returncode == 1
    assert "these steps failed, or there was no time for them: unheard_of\n" in done.stderr, done.stderr[-4000:]
    figures = answer_of(done)
    assert figures.keys() >= FIGURES
    assert all(type(value) in (int, float) and math.isfinite(value) for value in figures.values())
    assert figures["second_role_weight_bytes"] == 0
    assert 0 < figures["pd_computed_tokens"] <= TINY_PAGE


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", ["gpu/faults.py", "gpu/rows.py"])
def test_what_is_checked_on_a_gpu_holds_on_a_cpu(script: str) -> None:
    done = run(script, "--tiny", "--json")
    found = answer_of(done)
    assert {name: found["checks"][name] for name in found["failed"] if name != OF_A_TIME} == {}
    assert len(found["checks"]) > 25


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_cpu_bench_prints_its_figures_and_the_tokens_of_transformers() -> None:
    done = run("compute_cpu.py", "--json", "--pairs", "1")
    assert done.returncode == 0, done.stderr[-4000:]
    figures = answer_of(done)
    assert figures.keys() >= {"decode_ratio_to_transformers", "engine_ready_s"}
    assert all(type(value) in (int, float) and math.isfinite(value) for value in figures.values())
    assert figures["pairs_with_equal_tokens"] == figures["pairs"]
