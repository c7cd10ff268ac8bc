"""A request of a graph while an HTTP call waits for it, and the book of all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from omni_flow.control.request import Outcome
from omni_flow.control.runtime.errors import RequestFailed
from omni_flow.control.runtime.live_request import Span
from omni_flow.control.types import Audio, Text
from omni_flow.refs import ABSENT
from omni_flow.serve.errors import ApiError, brief, of_outcome
from omni_flow.serve.guard import Call
from omni_flow.serve.metrics import Metrics
from omni_flow.serve.served import Served
from omni_flow.serve.sessions import Sessions, SessionState
from omni_flow.serve.settings import Settings


class Running:
    """One request. Used as `with book.submit(...) as running`: leaving it while the request runs cancels it."""

    def __init__(self, book: Book, served: Served, call: Call, endpoint: str, session: SessionState | None) -> None:
        self.book, self.served, self.call, self.endpoint, self.session = book, served, call, endpoint, session
        self.created = time.time()
        self.ended: float | None = None
        self.started = time.monotonic()
        self.first: dict[str, float] = {}
        self._last = 0.0
        self.outputs: frozenset[str] | None = None
        self.sent: frozenset[str] = frozenset()
        self.delivered: dict[str, int] = {}
        self._enough = False

    def attach(self, live: Any) -> None:
        """The gateway has admitted it."""
        self.live = live
        self.id = f"{live.info.gateway.rpartition('-')[2]}-{live.info.number}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self.book.ended(self)

    # ---- what handlers do -----------------------------------------------------------------------------------

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.call.tenant

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while it runs. Done is too what the server ended because its caller had enough."""
        outcome: Outcome | None = self.live.outcome
        return Outcome.DONE if self._enough and outcome is Outcome.CANCELLED else outcome

    def cancel(self) -> bool:
        """End it, if it has not ended: everything it holds anywhere is freed."""
        done: bool = self.live.cancel()
        if done:
            self.live.node.flush()
        return done

    def enough(self) -> None:
        """The caller has all that was asked for: what else the graph would make is cancelled."""
        self._enough = self.live.outcome is None
        self.cancel()

    async def batch(self) -> list[tuple[str, Any]]:
        """The outputs at hand; none when it is over."""
        taken: list[tuple[str, Any]] = await self.live.batch()
        if taken:
            self._note(taken)
        return taken

    async def result(self) -> dict[str, Any]:
        """All outputs. Raises RequestFailed."""
        found: dict[str, Any] = await self.live.result()
        wanted = {name: value for name, value in found.items() if self.outputs is None or name in self.outputs}
        graph, streams = self.served.name, self.served.streams
        for name, value in wanted.items():
            number = self.delivered[name] = len(value) if name in streams else int(value is not ABSENT)
            self.book.metrics.frames.add(graph, name, by=number)
        return wanted

    def failures(self) -> dict[str, str]:
        """Why outputs failed, by name."""
        return {name: brief(failure) for name, failure in self.live.failures.items()}

    def error(self) -> ApiError | None:
        """What to tell the caller if it did not end well."""
        return None if self.outcome is Outcome.DONE else of_outcome(self.outcome, self.live.failures)

    async def push(self, placeholder: str, value: Any) -> None:
        """Send a frame; waits for credit. Raises InvalidInput."""
        await self.live.push(placeholder, value)

    def end(self, placeholder: str) -> None:
        """No more frames. Raises InvalidInput."""
        self.live.end(placeholder)

    # ---- what is noted --------------------------------------------------------------------------------------

    def _note(self, taken: list[tuple[str, Any]]) -> None:
        now = time.monotonic()
        metrics, graph = self.book.metrics, self.served.name
        texts = 0
        for name, _ in taken:
            kind = self.served.kinds[name]
            if name not in self.first:
                self.first[name] = since = now - self.started
                metrics.first_output.of(graph, name).observe(since)
                if isinstance(kind, Audio):
                    metrics.first_audio.of(graph, self.endpoint).observe(since)
                elif isinstance(kind, Text):
                    metrics.ttft.of(graph, self.endpoint).observe(since)
            if isinstance(kind, Text) and name in self.served.streams:
                texts += 1
            self.delivered[name] = self.delivered.get(name, 0) + 1
            metrics.frames.add(graph, name)
        if texts:
            if self._last:
                metrics.between.of(graph, self.endpoint).observe((now - self._last) / texts, texts)
            self._last = now

    def as_object(self, timeline: bool = False) -> dict[str, Any]:
        """For `/v1/requests`, the page and `omni-flow trace`."""
        about: dict[str, Any] = {
            "id": self.id,
            "object": "graph.request",
            "graph": self.served.name,
            "endpoint": self.endpoint,
            "call": self.call.id,
            "session": self.session.id if self.session is not None else None,
            "created": self.created,
            "ended": self.ended,
            "outcome": self.outcome,
            "failures": self.failures(),
            "first": self.first,
        }
        if timeline:
            about["timeline"] = [span_object(span) for span in self.live.spans]
        return about


def span_object(span: Span) -> dict[str, Any]:
    """An activation as JSON; times are seconds since the epoch."""
    return {
        "interface": span.interface,
        "path": span.path,
        "replica": span.replica,
        "queued": span.queued,
        "started": span.started,
        "ended": span.ended,
        "note": span.note,
    }


class Record:
    """A request that is over: what is told of it, and nothing of what it held."""

    __slots__ = ("_about", "_spans", "id", "tenant")

    def __init__(self, running: Running) -> None:
        self.id, self.tenant = running.id, running.tenant
        self._about = running.as_object()
        self._spans = list(running.live.spans)

    def as_object(self, timeline: bool = False) -> dict[str, Any]:
        """As `Running.as_object`."""
        return {**self._about, "timeline": [span_object(span) for span in self._spans]} if timeline else self._about

    def cancel(self) -> bool:
        """It has ended."""
        return False


class Book:
    """Requests under way, and the last ones that ended."""

    def __init__(self, settings: Settings, metrics: Metrics, sessions: Sessions) -> None:
        self.settings, self.metrics, self.sessions = settings, metrics, sessions
        self.live: dict[str, Running] = {}
        self.recent: deque[Record] = deque(maxlen=settings.recent)
        self.on_end: list[Callable[[Running], None]] = []
        self._second, self._sampled = 0, 0
        self.stopping = False
        self.every_timeline = False

    def submit(
        self,
        served: Served,
        call: Call,
        endpoint: str,
        inputs: Mapping[str, Any],
        *,
        params: Mapping[str, Any] | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        seed: int | None = None,
        timeline: bool = False,
        outputs: frozenset[str] | None = None,
    ) -> Running:
        """Admit a request. Raises what the gateway raises; ApiError 503 when the server is about to stop."""
        if self.stopping:
            raise ApiError(503, "the server is stopping", code="stopping", headers={"retry-after": "5"})
        most = self.settings.request_s
        state = self.sessions.of(call.tenant, session) if session is not None else None
        if state is not None and state.params:
            params = {**state.params, **(params or {})}
        running = Running(self, served, call, endpoint, state)
        try:
            live = served.deployment.gateway.submit(
                inputs,
                params=params,
                session=state.key if state is not None else None,
                deadline_s=most if deadline_s is None else min(deadline_s, most),
                seed=seed,
                timeline=timeline or self.every_timeline or self._sample(),
                trace=call.trace,
                tenant=call.key.salt,
                outputs=outputs,
            )
        except Exception:
            if state is not None:
                self.sessions.drop_unused(state)
            raise
        running.attach(live)
        running.outputs = outputs
        running.sent = frozenset(inputs) | served.pushed
        if state is not None:
            state.begin(call.key.salt)
        self.live[running.id] = running
        return running

    def _sample(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._sampled = second, 0
        self._sampled += 1
        return self._sampled <= self.settings.timeline_per_s

    def find(self, id: str, call: Call) -> Running | Record:
        """A request of this caller. Raises ApiError 404."""
        found = self.live.get(id) or next((r for r in self.recent if r.id == id), None)
        if found is None or found.tenant != call.tenant:
            raise ApiError(404, f"there is no request {id!r}, or it ended long ago", code="request_not_found")
        return found

    def ended(self, running: Running) -> None:
        """It is over: note what it was like."""
        if self.live.pop(running.id, None) is None:
            return
        running.ended = time.time()
        metrics, graph = self.metrics, running.served.name
        metrics.requests.add(graph, running.endpoint, str(running.outcome))
        metrics.request_s.of(graph, running.endpoint).observe(time.monotonic() - running.started)
        if running.session is not None:
            running.session.end()
        if running.live.info.timeline:
            metrics.sampled.add(graph)
        self.recent.append(Record(running))
        for told in self.on_end:
            told(running)


__all__ = ["Book", "RequestFailed", "Running", "span_object"]
