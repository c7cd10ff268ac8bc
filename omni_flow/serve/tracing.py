"""OpenTelemetry: a span for each request and, below it, one for each activation in whatever process it ran.

Needs the extra `[otel]`. Where spans go is OpenTelemetry's own environment: OTEL_EXPORTER_OTLP_ENDPOINT and so on. The
spans are made when the request is over, from the times that its replicas said, so nothing waits for an exporter.
"""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omni_flow.serve.running import Running

_NS = 1_000_000_000


class Tracing:
    """Makes spans of requests that ended."""

    def __init__(self, provider: Any = None) -> None:
        self._tracer = trace.get_tracer("omni_flow", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, running: Running) -> None:
        """A request is over."""
        parent = None
        if running.call.trace is not None:
            parent = self._propagator.extract({"traceparent": running.call.trace})
        span = self._tracer.start_span(
            f"{running.served.name} {running.endpoint}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=int(running.created * _NS),
            attributes={
                "omni_flow.graph": running.served.name,
                "omni_flow.endpoint": running.endpoint,
                "omni_flow.request": running.id,
                "omni_flow.call": running.call.id,
                "omni_flow.outcome": str(running.outcome),
            },
        )
        inside = trace.set_span_in_context(span)
        for one in running.live.spans:
            child = self._tracer.start_span(
                one.interface,
                context=inside,
                start_time=int(one.started * _NS),
                attributes={
                    "omni_flow.path": one.path,
                    "omni_flow.replica": one.replica,
                    "omni_flow.queued_s": max(0.0, one.started - one.queued),
                },
            )
            child.end(int(one.ended * _NS))
        failures = running.failures()
        if running.outcome != "done":
            span.set_status(Status(StatusCode.ERROR, "; ".join(failures.values()) or str(running.outcome)))
        span.end(int((running.ended or running.created) * _NS))


def exporter_tracing() -> Tracing:
    """Tracing to where OpenTelemetry's environment says. Raises ImportError without the extra."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "omni-flow"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
