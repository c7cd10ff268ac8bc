"""`restart_s`: see `bench/ssd.py`."""

from __future__ import annotations

import ssd

from .tools import Bench


def measure(bench: Bench) -> None:
    """From opening a directory of a million records to serving."""
    for key, value in ssd.restart(records=50_000 if bench.quick else 1_000_000).items():
        bench.add(key, value)
