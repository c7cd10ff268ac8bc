"""The live view of a server: what its graphs do right now, from activations that were noted and from its replicas.

Of a sample of requests every activation is noted (`Settings.timeline_per_s`); rates are scaled up from that. Queue
lengths and what replicas hold are asked for only while somebody looks.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

import omni_flow
from omni_flow.control.runtime.live_request import Span
from omni_flow.serve.edges import CLIENT, Edge, edges_of
from omni_flow.serve.health import report
from omni_flow.serve.memory import tiers
from omni_flow.serve.metrics import Gauge
from omni_flow.serve.running import Record, Running
from omni_flow.serve.served import Served
from omni_flow.serve.state import State

log = logging.getLogger("omni_flow.serve")

WINDOW_S = 10.0
CENSUS_S = 1.0
COUNTER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TOKENS = {
    "kv_hit_tokens": ("Tokens of prompts whose KV was found, by the tier it was found in", "tier"),
    "prompt_tokens": ("Tokens of prompts", ""),
    "generated_tokens": ("Tokens generated", ""),
}
"""Counters of roles with an engine: what they are, and what their part is called."""
STATES = ("up", "starting", "leaving", "degraded", "down")


@dataclass(slots=True)
class Noted:
    """An activation, or so many passings of an edge (`run_s` 0), at the server's clock."""

    at: float
    wait_s: float
    run_s: float
    times: int = 1


class GraphWatch:
    """What was noted of one graph within the last seconds."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.edges = edges_of(served.graph)
        self._into: dict[str, list[Edge]] = {}
        by_field = {edge.field: edge for edge in self.edges if edge.reader == CLIENT}
        outputs = served.graph.spec.outputs
        self._out = {name: by_field[slot.field] for name, slot in outputs.items() if slot.field in by_field}
        for edge in self.edges:
            self._into.setdefault(edge.reader, []).append(edge)
        self.interfaces: dict[str, deque[Noted]] = {i.name: deque() for i in served.graph.spec.interfaces}
        self.passed: dict[Edge, deque[Noted]] = {edge: deque() for edge in self.edges}
        self.ended: deque[tuple[float, bool, bool]] = deque()
        self._starts: dict[str, dict[tuple[str, str], float]] = {}
        self._open: dict[str, list[tuple[Edge, Span]]] = {}

    def span(self, running: Running, span: Span, now: float) -> None:
        """Note an activation; its edges are noted by `resolve`."""
        noted = self.interfaces.get(span.interface)
        if noted is not None:
            noted.append(Noted(now, max(0.0, span.started - span.queued), max(0.0, span.ended - span.started)))
        self._starts.setdefault(running.id, {})[span.interface, span.path] = span.started
        self._open.setdefault(running.id, []).extend((edge, span) for edge in self._into.get(span.interface, ()))

    def resolve(self, running: Running, now: float) -> list[tuple[Edge, float]]:
        """Note the edges whose source is known by now (one that streams is known when it ends), with their seconds."""
        starts, passed, left = self._starts.get(running.id, {}), [], []
        for edge, span in self._open.get(running.id, ()):
            if edge.source == CLIENT:
                began = running.created if edge.field in running.sent else None
            else:
                began = _above(starts, edge.source, span.path)
            if began is None:
                left.append((edge, span))
                continue
            took = max(0.0, span.queued - began)
            self.passed[edge].append(Noted(now, took, 0.0))
            passed.append((edge, took))
        self._open[running.id] = left
        return passed

    def end(self, running: Running, now: float) -> None:
        """A request is over."""
        self._starts.pop(running.id, None)
        self._open.pop(running.id, None)
        if running.live.info.timeline:
            for name, number in running.delivered.items():
                edge = self._out.get(name)
                if edge is not None:
                    took = running.first.get(name, time.monotonic() - running.started)
                    self.passed[edge].append(Noted(now, took, 0.0, number))
        self.ended.append((now, running.outcome == "done", running.live.info.timeline))

    def expire(self, now: float) -> None:
        """Forget what is older than the window."""
        for noted in (*self.interfaces.values(), *self.passed.values()):
            while noted and now - noted[0].at > WINDOW_S:
                noted.popleft()
        while self.ended and now - self.ended[0][0] > WINDOW_S:
            self.ended.popleft()

    @property
    def scale(self) -> float:
        """Requests to one of which activations were noted."""
        sampled = sum(1 for _, _, noted in self.ended if noted)
        return len(self.ended) / sampled if sampled else 1.0


def _above(starts: dict[tuple[str, str], float], interface: str, path: str) -> float | None:
    """When the activation of `interface` at `path`, or at the nearest path above it, began."""
    while True:
        found = starts.get((interface, path))
        if found is not None or not path:
            return found
        path = path.rpartition("/")[0]


def _summary(noted: deque[Noted], scale: float) -> dict[str, float]:
    waits, runs = sorted(n.wait_s for n in noted), sorted(n.run_s for n in noted)
    return {
        "per_s": round(sum(n.times for n in noted) / WINDOW_S * scale, 3),
        "wait_p50_ms": _at(waits, 0.5),
        "wait_p95_ms": _at(waits, 0.95),
        "run_p50_ms": _at(runs, 0.5),
        "run_p95_ms": _at(runs, 0.95),
    }


def _at(ordered: list[float], q: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1000, 3) if ordered else 0.0


class Watch:
    """Ticks each second; `snapshot` is what the page, `omni-flow top` and the metrics show."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.graphs = {name: GraphWatch(served) for name, served in state.catalogue.graphs.items()}
        self._seen: dict[str, int] = {}
        self._census: dict[str, dict[str, dict[str, int]]] = {name: {} for name in self.graphs}
        self._counters: dict[str, dict[str, dict[str, int]]] = {name: {} for name in self.graphs}
        self.memory = state.memory
        self._asked = 0.0
        self._asking = asyncio.Lock()
        self._began = time.time()
        state.book.on_end.append(self._ended)
        state.metrics.gauges, state.metrics.counted = self._gauges, self._counted

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.tick()

    def tick(self) -> None:
        """Take the activations of live requests, forget old ones, and sessions that nobody uses."""
        now = time.monotonic()
        for running in self._state.book.live.values():
            if running.live.info.timeline:
                self._take(running, now)
        for graph in self.graphs.values():
            graph.expire(now)
        self._state.sessions.expire()

    def _ended(self, running: Running) -> None:
        now = time.monotonic()
        self._take(running, now)
        self._seen.pop(running.id, None)
        self.graphs[running.served.name].end(running, now)

    def _take(self, running: Running, now: float) -> None:
        spans = running.live.spans
        metrics, graph = self._state.metrics, running.served.name
        for span in spans[self._seen.get(running.id, 0) :]:
            metrics.spans.add(graph, span.interface)
            metrics.queue_s.of(graph, span.interface).observe(max(0.0, span.started - span.queued))
            metrics.run_s.of(graph, span.interface).observe(max(0.0, span.ended - span.started))
            self.graphs[graph].span(running, span, now)
        for edge, took in self.graphs[graph].resolve(running, now):
            metrics.edge_s.of(graph, edge.source, edge.field, edge.reader).observe(took)
        self._seen[running.id] = len(spans)

    async def census(self) -> dict[str, dict[str, dict[str, int]]]:
        """What replicas hold, by graph and replica, at most a second old; one that does not answer is left out."""
        async with self._asking:
            if time.monotonic() - self._asked > CENSUS_S:
                for name, watch in self.graphs.items():
                    try:
                        async with asyncio.timeout(CENSUS_S):
                            self._census[name] = await watch.served.deployment.census()
                            self._counters[name] = await watch.served.deployment.counters()
                    except TimeoutError:
                        log.warning("replicas of %s did not say what they hold", name)
                    await self.memory[name].look()
                self._asked = time.monotonic()
        return self._census

    async def snapshot(self, tenant: str) -> dict[str, Any]:
        """Everything at this moment; of requests only the caller's."""
        held = await self.census()
        self.tick()
        health = report(self._state)
        book = self._state.book
        every: list[Running | Record] = [*book.recent, *book.live.values()]
        mine = [r for r in every if r.tenant == tenant]
        return {
            "time": time.time(),
            "version": omni_flow.__version__,
            "up_s": round(time.time() - self._began, 1),
            "status": health["status"],
            "live": len(book.live),
            "sessions": len(self._state.sessions),
            "graphs": [self._graph(watch, health["graphs"][name], held[name]) for name, watch in self.graphs.items()],
            "requests": [r.as_object() for r in mine[:-31:-1]],
        }

    def _graph(self, watch: GraphWatch, roles: dict[str, Any], held: dict[str, dict[str, int]]) -> dict[str, Any]:
        gateway, scale = watch.served.deployment.gateway, watch.scale
        memory = self.memory[watch.served.name].last
        for role in roles.values():
            for replica in role["replicas"]:
                id = f"{replica['place']}@{replica['epoch']}"
                counters = self._counters[watch.served.name].get(id, {})
                replica |= {"held": held.get(id, {}), "pinned": gateway.load.get(id, 0), "counters": counters}
        spec = watch.served.graph.spec
        done = [ok for _, ok, _ in watch.ended]
        return {
            "name": watch.served.name,
            "live": len(gateway.live),
            "requests_per_s": round(len(done) / WINDOW_S, 3),
            "failed_per_s": round(done.count(False) / WINDOW_S, 3),
            "roles": list(roles.values()),
            "memory": None if memory is None else {**tiers(memory), "tokens": self._tokens(watch.served.name)},
            "interfaces": [
                {"name": i.name, "role": i.role, **_summary(watch.interfaces[i.name], scale)} for i in spec.interfaces
            ],
            "edges": [{**edge.as_object(), **_summary(watch.passed[edge], scale)} for edge in watch.edges],
            "endpoints": [
                {"kind": type(e).__name__, "model": watch.served.model_of(e)} for e in watch.served.endpoints
            ],
            "inputs": {name: str(kind or "any") for name, kind in watch.served.inputs.items()},
            "outputs": {name: str(kind or "any") for name, kind in watch.served.kinds.items()},
        }

    def _tokens(self, graph: str) -> dict[str, int]:
        """Tokens of prompts that roles have seen, and found in each tier."""
        total: dict[str, int] = {}
        for counters in self._counters[graph].values():
            for name in ("prompt_tokens", "kv_hit_tokens/l1", "kv_hit_tokens/l2", "kv_hit_tokens/l3"):
                if name in counters:
                    part = name.rpartition("/")[2]
                    total[part] = total.get(part, 0) + counters[name]
        return total

    def _gauges(self) -> list[Gauge]:
        """For Prometheus; `census` is asked before."""
        up, restarts, pinned = [], [], []
        held: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for name, watch in self.graphs.items():
            deployment = watch.served.deployment
            for role in deployment.status().values():
                for replica in role.replicas:
                    labels = (name, role.role, replica.place)
                    up += [((*labels, s), float(replica.state == s)) for s in STATES]
                    restarts.append((labels, float(replica.restarts)))
                    id = f"{replica.place}@{replica.epoch}"
                    pinned.append((labels, float(deployment.gateway.load.get(id, 0))))
                    for what, number in self._census[name].get(id, {}).items():
                        held.setdefault(what, []).append((labels, float(number)))
        place = ("graph", "role", "replica")
        live = [((name,), float(len(w.served.deployment.gateway.live))) for name, w in self.graphs.items()]
        gauges: list[Gauge] = [
            ("omni_flow_live_requests", "Requests under way", ("graph",), live),
            ("omni_flow_sessions", "Sessions of callers", (), [((), float(len(self._state.sessions)))]),
            ("omni_flow_replica_state", "1 for the state a replica is in", (*place, "state"), up),
            ("omni_flow_replica_restarts", "Deaths that were followed by a start", place, restarts),
            ("omni_flow_replica_pinned", "Live requests placed on a replica", place, pinned),
        ]
        about = {
            "requests": "Requests a replica takes part in",
            "nodes": "Buckets a replica has open",
            "running": "Activations that run or wait for a thread",
            "open_numbers": "Numbers of streams not acknowledged yet: credit in use",
        }
        figures: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for name, look in self.memory.items():
            for full, figure_now in (look.last or {}).items():
                figure, _, part = full.partition("/")
                figures.setdefault(figure, []).append(((name, part), float(figure_now)))
            if look.present:
                figures.setdefault("up", []).append(((name, ""), float(look.last is not None)))
        gauges += [
            (f"omni_flow_memory_{figure}", f"Memory manager: {figure.replace('_', ' ')}", ("graph", "part"), values)
            for figure, values in figures.items()
        ]
        for what, values in held.items():
            gauges.append((f"omni_flow_replica_{what}", about.get(what, what), place, values))
        return gauges

    def _counted(self) -> list[Gauge]:
        """What roles count, for Prometheus: `name`, or `name/part`; `census` is asked before."""
        place = ("graph", "role", "replica")
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in TOKENS}
        for graph, replicas in self._counters.items():
            for id, counters in replicas.items():
                labels = (graph, id.rpartition("/")[0], id.rpartition("@")[0])
                for full, number in counters.items():
                    name, _, part = full.partition("/")
                    if COUNTER.fullmatch(name):
                        found.setdefault(name, []).append(((*labels, part), float(number)))
        counted: list[Gauge] = []
        for name, values in found.items():
            about, part = TOKENS.get(name, (f"Counted by the role: {name}", "part"))
            full = f"omni_flow_{name}" if name in TOKENS else f"omni_flow_role_{name}"
            kept = values if part else [(labels[:-1], number) for labels, number in values]
            counted.append((full, about, (*place, part) if part else place, kept))
        return counted


def encode_event(snapshot: dict[str, Any]) -> bytes:
    """A snapshot as one event."""
    return b"data: " + msgspec.json.encode(snapshot, enc_hook=repr) + b"\n\n"
