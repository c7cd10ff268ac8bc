"""What the server counts, in Prometheus' text form at `/metrics`.

Counters and histograms here are plain numbers that cost a fraction of a microsecond: they are touched for each token.
`prometheus_client` writes them out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Labels = tuple[str, ...]


class Histogram:
    """Counts by bucket, their number and sum."""

    __slots__ = ("counts", "number", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.number = 0
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Note a value, `times` times."""
        self.counts[bisect_left(SECONDS, value)] += times
        self.number += times
        self.total += value * times

    def quantile(self, q: float) -> float:
        """An upper bound of the value below which a share `q` lies; 0 when there is none."""
        left = q * self.number
        for bound, count in zip((*SECONDS, float("inf")), self.counts, strict=True):
            left -= count
            if left <= 0 and self.number:
                return bound
        return 0.0


class Histograms:
    """One histogram for each set of labels."""

    def __init__(self, name: str, about: str, labels: Sequence[str]) -> None:
        self.name, self.about, self.labels = name, about, tuple(labels)
        self.by: dict[Labels, Histogram] = {}

    def of(self, *labels: str) -> Histogram:
        """The histogram of these labels, made at need."""
        found = self.by.get(labels)
        if found is None:
            found = self.by[labels] = Histogram()
        return found

    def collect(self) -> Metric:
        """For Prometheus."""
        family = HistogramMetricFamily(self.name, self.about, labels=self.labels)
        for labels, one in self.by.items():
            running, buckets = 0, []
            for bound, count in zip((*map(str, SECONDS), "+Inf"), one.counts, strict=True):
                running += count
                buckets.append((bound, float(running)))
            family.add_metric(labels, buckets, one.total)
        return family


class Counters:
    """One number for each set of labels."""

    def __init__(self, name: str, about: str, labels: Sequence[str]) -> None:
        self.name, self.about, self.labels = name, about, tuple(labels)
        self.by: dict[Labels, float] = {}

    def add(self, *labels: str, by: float = 1) -> None:
        """Count."""
        self.by[labels] = self.by.get(labels, 0) + by

    def collect(self) -> Metric:
        """For Prometheus."""
        family = CounterMetricFamily(self.name, self.about, labels=self.labels)
        for labels, value in self.by.items():
            family.add_metric(labels, value)
        return family


Gauge = tuple[str, str, Sequence[str], Sequence[tuple[Labels, float]]]
"""Name, what it is, names of labels, and (labels, value) for each."""


class Metrics:
    """All of them. `gauges`, and what is `counted` elsewhere, are asked for when somebody looks."""

    def __init__(self) -> None:
        self.http = Counters("omni_flow_http_requests", "HTTP calls by route and status", ("route", "status"))
        self.http_s = Histograms("omni_flow_http_seconds", "Time of HTTP calls, first byte to last", ("route",))
        self.requests = Counters("omni_flow_requests", "Requests by outcome", ("graph", "endpoint", "outcome"))
        self.request_s = Histograms("omni_flow_request_seconds", "Admission to outcome", ("graph", "endpoint"))
        self.ttft = Histograms("omni_flow_first_text_seconds", "Admission to the first text", ("graph", "endpoint"))
        self.first_audio = Histograms(
            "omni_flow_first_audio_seconds", "Admission to the first sound", ("graph", "endpoint")
        )
        self.first_output = Histograms(
            "omni_flow_first_output_seconds", "Admission to the first value of an output", ("graph", "output")
        )
        self.between = Histograms("omni_flow_inter_token_seconds", "Between pieces of text", ("graph", "endpoint"))
        self.frames = Counters("omni_flow_output_frames", "Values delivered to clients", ("graph", "output"))
        self.queue_s = Histograms(
            "omni_flow_queue_seconds",
            "Activations: inputs complete to start (sampled)",
            ("graph", "interface"),
        )
        self.run_s = Histograms("omni_flow_run_seconds", "Activations: start to end (sampled)", ("graph", "interface"))
        self.edge_s = Histograms(
            "omni_flow_edge_seconds",
            "Start of the writer to complete inputs of the reader (sampled)",
            ("graph", "source", "field", "reader"),
        )
        self.spans = Counters("omni_flow_activations", "Activations of sampled requests", ("graph", "interface"))
        self.sampled = Counters("omni_flow_sampled_requests", "Requests whose activations were noted", ("graph",))
        self.refused = Counters("omni_flow_refused", "Calls refused, by code", ("code",))
        self.gauges: Callable[[], Sequence[Gauge]] = lambda: ()
        self.counted: Callable[[], Sequence[Gauge]] = lambda: ()
        self._registry = CollectorRegistry()
        self._registry.register(_All(self))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def text(self) -> bytes:
        """The whole in Prometheus' text form."""
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """For Prometheus."""
        for each in vars(self).values():
            if isinstance(each, (Counters, Histograms)):
                yield each.collect()
        for kind, asked in ((GaugeMetricFamily, self.gauges), (CounterMetricFamily, self.counted)):
            for name, about, names, values in asked():
                family = kind(name, about, labels=names)
                for labels, value in values:
                    family.add_metric(labels, value)
                yield family


class _All(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()

    def describe(self) -> list[Metric]:
        """Nothing is known before it is asked for."""
        return []
