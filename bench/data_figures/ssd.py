"""`ssd_write_ratio`, `ssd_read_ratio`: see `bench/ssd.py`."""

from __future__ import annotations

import ssd

from .tools import Bench


def measure(bench: Bench) -> None:
    """The SSD tier against raw O_DIRECT files."""
    for key, value in ssd.throughput(rounds=bench.rounds(7)).items():
        bench.add(key, value)
