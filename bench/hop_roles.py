"""Identity roles of the hop benchmark. A module of its own, so that worker processes import it and nothing else."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from omni_flow import Context, Graph, collect, count, last, stream

CHUNK = 4096
STAMP = struct.Struct("<d")


class Identity:
    """Returns what it is given."""

    async def run(self, x: Any) -> Any:
        return x

    async def join(self, a: Any, b: Any) -> Any:
        return a


class Copied:
    """Answers an array with one of its size from its own, ordinary memory, which has to be copied to its reader."""

    def __init__(self) -> None:
        self._own: dict[int, Any] = {}

    async def run(self, x: Any) -> Any:
        own = self._own.get(x.nbytes)
        if own is None:
            own = self._own[x.nbytes] = np.full(x.nbytes, 1, np.uint8)
        return own


class InPlace:
    """Answers an array with another of its size, computed where its reader will find it. (Not touched here.)"""

    async def run(self, ctx: Context, x: Any) -> Any:
        return ctx.empty(x.shape, x.dtype)

    async def make(self, ctx: Context, n: int) -> Any:
        return ctx.empty(n, np.uint8)


class Source:
    """Streams 4 KiB chunks that carry the time they were made (CLOCK_MONOTONIC, one clock for all processes)."""

    async def paced(self, n: int) -> AsyncIterator[bytes]:
        for _ in range(n):
            await asyncio.sleep(0.002)
            yield STAMP.pack(time.monotonic()) + bytes(CHUNK - STAMP.size)

    async def burst(self, n: int) -> AsyncIterator[bytes]:
        for _ in range(n):
            yield STAMP.pack(time.monotonic()) + bytes(CHUNK - STAMP.size)

    async def endless(self, n: int) -> AsyncIterator[bytes]:
        chunk = bytes(CHUNK)
        while True:
            yield chunk


class Sink:
    """One activation per frame: how late it is, in seconds."""

    async def late(self, frame: bytes) -> float:
        return time.monotonic() - STAMP.unpack_from(frame)[0]

    async def seen(self, frame: bytes) -> list[float]:
        return [STAMP.unpack_from(frame)[0], time.monotonic()]

    async def span(self, first: list[list[float]], final: list[float]) -> float:
        """Seconds from the first chunk's making to the last one's activation."""
        return final[1] - first[0][0]


class Hold:
    """Takes frames and never gives them back, so that its stream stays open."""

    async def take(self, frame: bytes) -> bytes:
        await asyncio.Event().wait()
        return frame


def chain(length: int) -> Graph:
    """`length` identity roles in a row."""
    graph = Graph(f"chain{length}")
    field = graph.placeholder("x", int)
    for k in range(length):
        field = graph.role(f"e{k}", Identity).interface("run", inputs=[[{"x": field}]], outputs=["y"]).y
    graph.output(y=field)
    return graph


def arrays(length: int, cls: type) -> Graph:
    """A role that makes an array of n bytes, and behind it `length` roles in a row: `Copied`, `InPlace`, or `Identity`,
    which gives on what it was given."""
    graph = Graph(f"arrays{length}")
    n = graph.placeholder("n", int)
    field = graph.role("source", InPlace).interface("make", inputs=[[n]], outputs=["y"]).y
    for k in range(length):
        field = graph.role(f"e{k}", cls).interface("run", inputs=[[{"x": field}]], outputs=["y"]).y
    graph.output(y=field)
    return graph


def diamond() -> Graph:
    """One source forks, two branches meet: four roles."""
    graph = Graph("diamond")
    x = graph.placeholder("x", int)
    top = graph.role("top", Identity).interface("run", inputs=[[x]], outputs=["y"])
    left = graph.role("left", Identity).interface("run", inputs=[[{"x": top.y}]], outputs=["y"])
    right = graph.role("right", Identity).interface("run", inputs=[[{"x": top.y}]], outputs=["y"])
    meet = graph.role("meet", Identity).interface("join", inputs=[[{"a": left.y, "b": right.y}]], outputs=["y"])
    graph.output(y=meet.y)
    return graph


def paced() -> Graph:
    """Source to sink, one activation per frame; the client receives how late each was."""
    graph = Graph("paced")
    n = graph.placeholder("n", int)
    source = graph.role("source", Source).interface("paced", inputs=[[n]], outputs=[stream("frame")])
    sink = graph.role("sink", Sink).interface("late", inputs=[[source.frame]], outputs=["late"])
    graph.output(late=collect(sink.late))
    return graph


def burst() -> Graph:
    """Source to sink as fast as credit allows; one number comes back."""
    graph = Graph("burst")
    n = graph.placeholder("n", int)
    source = graph.role("source", Source).interface("burst", inputs=[[n]], outputs=[stream("frame")])
    sink = graph.role("sink", Sink)
    seen = sink.interface("seen", inputs=[[source.frame]], outputs=["seen"])
    span = sink.interface("span", inputs=[[{"first": count(seen.seen, 1), "final": last(seen.seen)}]], outputs=["s"])
    graph.output(span=span.s)
    return graph


def held() -> Graph:
    """Three processes with open streams: an endless source, frames held by two sinks."""
    graph = Graph("held")
    n = graph.placeholder("n", int)
    source = graph.role("source", Source).interface("endless", inputs=[[n]], outputs=[stream("frame")])
    for k in range(2):
        sink = graph.role(f"hold{k}", Hold).interface("take", inputs=[[source.frame]], outputs=["y"])
        graph.output(**{f"y{k}": sink.y})
    return graph
