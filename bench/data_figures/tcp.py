"""`tcp_ratio_to_socket`: see `bench/transfer.py`."""

from __future__ import annotations

import transfer

from .tools import Bench


def measure(bench: Bench) -> None:
    """64 MiB over loopback, driver against raw socket."""
    for key, value in transfer.measure(bench.rounds(15)).items():
        bench.add(key, value)
