"""Prometheus metrics of a memory manager: a collector over the plain numbers it keeps anyway.

The server counts in ints; nothing here runs on its thread. `python -m omni_flow.data.metrics PATH PORT` serves them
on loopback, as a client like any other; any process that has a client can register a `MemoryCollector` of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError, SystemRefusal, run_process

GAUGES: Final = (
    "slots", "free", "pinned", "waiting", "pages", "objects", "leases", "reservations", "bytes", "running", "on",
    "sessions", "_s", "_at", "orphans", "movers", "largest_free", "prefetches", "quarantined",
)  # fmt: skip


def is_gauge(name: str) -> bool:
    """Whether a number may fall; everything else only counts up."""
    return name == "sessions" or any(name.endswith(end) for end in GAUGES if end not in ("sessions",))


class MemoryCollector(Collector):
    """Turns the numbers of `stats()` into metric families `omni_data_<name>`; what stands behind a slash is a label.

    Args:
        stats: gives the numbers; a failing one is reported as `omni_data_up 0`.
    """

    def __init__(self, stats: Callable[[], dict[str, int | float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("omni_data_up", "1 while the memory manager answers")
        try:
            numbers = self._stats()
        except DataError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        families: dict[str, Metric] = {}
        for full, value in sorted(numbers.items()):
            name, _, label = full.partition("/")
            family = families.get(name)
            if family is None:
                kind = GaugeMetricFamily if is_gauge(name) else CounterMetricFamily
                labels = ["pool" if name.startswith("pool_") else "name"] if label else []
                family = families[name] = kind(f"omni_data_{name}", name.replace("_", " "), labels=labels)
            family.add_metric([label] if label else [], value)  # type: ignore[attr-defined]
        yield from families.values()


def registry_of(client: MemoryManagerClient) -> CollectorRegistry:
    """A registry that holds the metrics of one memory manager."""
    registry = CollectorRegistry()
    registry.register(MemoryCollector(client.stats))
    return registry


def main(argv: Sequence[str]) -> None:
    """Serve metrics until the memory manager has gone. Its session called `metrics` is there once the port is open."""
    path, port = argv[1], int(argv[2])
    numbers = registry_of(MemoryManagerClient(path, role="viewer"))
    try:
        server, thread = start_http_server(port, "127.0.0.1", numbers)
    except OSError as error:
        raise SystemRefusal(f"no metrics at port {port}: {error.strerror}", "choose another --metrics-port") from error
    try:
        with MemoryManagerClient(path, name="metrics", role="viewer") as watch:
            watch.wait_end()
    finally:
        server.shutdown()
        thread.join()


if __name__ == "__main__":
    run_process(lambda: main(sys.argv))
