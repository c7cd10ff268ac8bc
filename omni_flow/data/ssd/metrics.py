"""Prometheus metrics of the SSD tiers of one process: `omni_ssd_<name>{pool="…"}`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_flow.data.ssd.config import Counters
from omni_flow.data.ssd.tier import SsdTier

GAUGES = {
    "on": "1 while the tier is in use, 0 while a sick disk has turned it off",
    "direct": "1 when the file system does O_DIRECT",
    "records": "records that can be read",
    "payload_bytes": "bytes of their payloads",
    "disk_bytes": "bytes on disk, everything included",
    "cap_bytes": "most bytes on disk",
    "segments": "segment files",
    "memory_bytes": "bytes of the tables in memory",
    "write_amplification": "bytes written for each byte put",
}


class SsdCollector(Collector):
    """Reads the tiers' own numbers when it is asked; costs nothing otherwise.

    Args:
        tiers: by pool; may grow later.
    """

    def __init__(self, tiers: Mapping[str, SsdTier]) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        stats = {pool: tier.stats() for pool, tier in dict(self._tiers).items()}
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"omni_ssd_{name}", text, labels=["pool"])
            for pool, numbers in stats.items():
                gauge.add_metric([pool], float(getattr(numbers, name)))
            yield gauge
        times = CounterMetricFamily("omni_ssd_times_off", "how often a sick disk turned the tier off", labels=["pool"])
        for pool, numbers in stats.items():
            times.add_metric([pool], numbers.times_off)
        yield times
        for name in (field.name for field in fields(Counters)):
            counter = CounterMetricFamily(f"omni_ssd_{name}", name.replace("_", " "), labels=["pool"])
            for pool, numbers in stats.items():
                counter.add_metric([pool], getattr(numbers.counters, name))
            yield counter
