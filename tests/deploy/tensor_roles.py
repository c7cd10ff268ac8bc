"""Roles that make, give on and look at large arrays, and what the pool says of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch

from omni_flow import Context, Graph, Tensor, collect, stream
from omni_flow.data.client import MemoryManagerClient
from omni_flow.deploy.launchers import LocalLauncher

from .conftest import WAIT_S

MIB = 1 << 20


class Echo:
    async def run(self, x: Any) -> Any:
        return x


class Keeps:
    """Gives on what it was given by the request before."""

    def __init__(self) -> None:
        self.kept: Any = None

    async def run(self, x: Any) -> Any:
        before, self.kept = self.kept, x
        return x if before is None else before


class Where:
    """Tells whether an array lies in the arena, and whether it may be written."""

    async def look(self, x: Any) -> Any:
        array = np.asarray(x)
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return {"shared": type(owner.base).__name__ == "Share", "writable": bool(array.flags.writeable)}

    async def kind(self, x: Any) -> str:
        return f"{type(x).__name__} {x.dtype} {tuple(x.shape)} {float(x.sum())}"


class Views:
    """Gives on what it was given, or has made in place, as a view that is not the bytes below it."""

    async def conjugate(self, x: Any) -> Any:
        return x.conj()

    async def reversed(self, x: Any) -> Any:
        return x.view(x.dtype.newbyteorder())

    async def foreign(self, ctx: Context, x: Any) -> Any:
        array = ctx.empty(x.shape, ">f4")
        array[:] = x
        return array


class Sums:
    async def sum(self, n: int) -> float:
        return float((torch.ones(n) + 1).sum())


class InPlace:
    def make(self, ctx: Context, n: int) -> Any:
        array = ctx.empty((n,), "float32")
        array[:] = 7
        return array

    async def stream(self, ctx: Context, n: int) -> AsyncIterator[Any]:
        for k in range(n):
            array = ctx.empty((MIB // 4,), "float32")
            array[:] = k
            yield array

    def head(self, ctx: Context, n: int) -> Any:
        array = ctx.empty((2 * n,), "float32")
        array[:] = 7
        return array[:n]

    def view(self, ctx: Context, n: int) -> Any:
        """A part of an array whose whole is forgotten meanwhile."""
        part = ctx.empty((2 * n,), "float32")[n:]
        part[:] = 7
        for _ in range(64):
            ctx.empty((2 * n,), "float32")[:] = 1
        return part

    async def drop(self, ctx: Context, n: int) -> int:
        for _ in range(n):
            ctx.empty((MIB,), "uint8")[:] = 1
        return n


class Firsts:
    async def first(self, frame: Any) -> float:
        return float(frame[0])


class Holds:
    async def hold(self, frame: Any) -> float:
        await asyncio.Event().wait()
        return float(frame[0])


def one(cls: type, method: str, placeholder: Any = None) -> Graph:
    graph = Graph("one")
    name = "n" if cls is InPlace else "x"
    field = graph.placeholder(name, placeholder or int)
    graph.output(y=graph.role("r", cls).interface(method, inputs=[[field]], outputs=["y"]).y)
    return graph


def temp_of(app: Any) -> dict[str, int | float]:
    """Counters of the deployment's TempBuffer pool, after all that clients released was taken back."""
    launcher = app.launcher
    assert isinstance(launcher, LocalLauncher)
    assert launcher.memory is not None
    with MemoryManagerClient(launcher.memory.address, name="test", role="viewer") as client:
        stats = client.stats()
        assert client.check() == []
    return {k: v for k, v in stats.items() if k.startswith("temp_")}


async def all_running(app: Any) -> None:
    """Until each replica runs something; asking takes its time."""
    async with asyncio.timeout(WAIT_S):
        while min(held["running"] for held in (await app.census()).values()) == 0:
            pass


async def until_counted(app: Any, counter: str, number: int) -> None:
    """Until a counter of the TempBuffer pool is `number`; each look has releases taken back."""
    async with asyncio.timeout(WAIT_S):
        while (await asyncio.to_thread(temp_of, app))[counter] != number:
            pass


def row(length: int, placeholder: Any = None) -> Graph:
    """Roles in a row that give on what they are given; each is read by a bystander, too."""
    graph = Graph("row")
    field = graph.placeholder("x", placeholder or Tensor())
    for k in range(length):
        field = graph.role(f"e{k}", Echo).interface("run", inputs=[[{"x": field}]], outputs=["y"]).y
        side = graph.role(f"side{k}", Firsts).interface("first", inputs=[[{"frame": field}]], outputs=["y"])
        graph.output(**{f"first{k}": side.y})
    graph.output(y=field)
    return graph


def streamed(reader: type, method: str) -> Graph:
    graph = Graph("streamed")
    n = graph.placeholder("n", int)
    frames = graph.role("make", InPlace).interface("stream", inputs=[[n]], outputs=[stream("frame")])
    for k in range(2):
        read = graph.role(f"read{k}", reader).interface(method, inputs=[[frames.frame]], outputs=["y"])
        graph.output(**{f"y{k}": collect(read.y)})
    return graph
