"""Speed of the data plane: `python bench/data_plane.py [--json] [--quick] [--only TOPIC …]`.

Figures that depend on the machine are ratios to limits measured in the same run, interleaved. Keys without suffix:
client and server on two cores; `_one_core`: both pinned to one. Each topic is a module of `data_figures/`; one that
cannot run here says so on stderr and fails the run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from data_figures.tools import Bench

TOPICS = sorted(
    path.stem
    for path in (Path(__file__).parent / "data_figures").glob("*.py")
    if path.stem not in ("__init__", "tools")
)


def machine() -> str:
    """Processor, kernel and the versions that matter."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    parts = [f"{name} {version(name)}" for name in ("numpy", "msgspec", "pyzmq", "xxhash")]
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, "
        + ", ".join(parts)
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object of medians on stdout and nothing else")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    parser.add_argument("--only", nargs="*", choices=TOPICS, default=TOPICS, metavar="TOPIC")
    options = parser.parse_args()
    bench = Bench(options.quick)
    for topic in options.only:
        print(f"{topic} …", file=sys.stderr, flush=True)
        importlib.import_module(f"data_figures.{topic}").measure(bench)
    if options.json:
        print(json.dumps({key: round(bench.figure(key), 4) for key in sorted(bench.samples)}))
        return
    print(machine())
    print(f"{'figure':36} {'median':>14} {'quartiles':>28} {'n':>5}")
    for key, samples in sorted(bench.samples.items()):
        low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        print(f"{key:36} {middle:14,.3f} {f'{low:,.3f} … {high:,.3f}':>28} {len(samples):5}")


if __name__ == "__main__":
    main()
