"""Small real roles and graphs for the tests of deployment."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from omni_flow import Context, Graph, Text, collect, stream


class Letters:
    """Streams the letters of a text, slowly enough that many requests are under way at once."""

    async def split(self, text: str) -> AsyncIterator[str]:
        for letter in text:
            await asyncio.sleep(0.001)
            yield letter


class Upper:
    async def run(self, letter: str) -> str:
        await asyncio.sleep(0.002)
        return letter.upper()


class Lower:
    async def run(self, letter: str) -> str:
        return letter.lower()


class Join:
    async def run(self, upper: Sequence[str], lower: Sequence[str]) -> str:
        return "".join(upper) + "".join(lower)


class Bystander:
    async def run(self, other: Any) -> Any:
        return other


def diamond(upper: int = 2, retries: int = 0) -> Graph:
    """text → letters, each to an upper and a lower one, both collected; and a part that touches none of them."""
    graph = Graph("diamond")
    text, other = graph.placeholder("text", Text), graph.placeholder("other", Text)
    letters = graph.role("letters", Letters).interface("split", inputs=[[text]], outputs=[stream("letter")])
    ups = graph.role("upper", Upper, replicas=upper).interface(
        "run", inputs=[[letters.letter]], outputs=["one"], retries=retries
    )
    lows = graph.role("lower", Lower, replicas=2).interface("run", inputs=[[letters.letter]], outputs=["one"])
    joined = graph.role("join", Join).interface(
        "run", inputs=[[{"upper": collect(ups.one), "lower": collect(lows.one)}]], outputs=["both"]
    )
    beside = graph.role("bystander", Bystander).interface("run", inputs=[[other]], outputs=["same"])
    graph.output(both=joined.both, each=ups.one, same=beside.same)
    return graph


def one(cls: type, method: str = "run", **options: Any) -> Graph:
    """A graph of one role and one interface: placeholder x, output y."""
    graph = Graph("one")
    x = graph.placeholder("x", Text)
    graph.output(y=graph.role("r", cls, **options).interface(method, inputs=[[x]], outputs=["y"]).y)
    return graph


class Echo:
    async def run(self, x: str) -> str:
        return x


class Pid:
    """Says which process it lives in."""

    async def run(self, x: str) -> int:
        return os.getpid()


class Unloadable:
    def __init__(self) -> None:
        import a_module_that_nobody_has  # noqa: F401

    async def run(self, x: str) -> str:
        return x


class DiesWhileLoading:
    def __init__(self) -> None:
        os._exit(9)

    async def run(self, x: str) -> str:
        return x


class NeverLoads:
    """Says which process it is in and is never ready."""

    def setup(self) -> None:
        print(os.getpid(), flush=True)
        threading.Event().wait()

    async def run(self, x: str) -> str:
        return x


class Tidy:
    """Logs, and leaves a file when it is closed in an orderly way."""

    def __init__(self, file: str = "") -> None:
        self._file = file

    def run(self, ctx: Context, x: str) -> str:
        ctx.log.info("got %s", x)
        return x

    def close(self) -> None:
        with open(self._file, "x"):
            pass


class Ails:
    """Can't serve while a file is there; its text says why."""

    def __init__(self, file: str) -> None:
        self._file = file

    async def run(self, x: str) -> str:
        return x

    def ails(self) -> str:
        try:
            with open(self._file) as cause:
                return cause.read()
        except FileNotFoundError:
            return ""


class ClosesSlowly(Ails):
    """Can't serve from the moment on that it is closed, which takes it a while."""

    async def close(self) -> None:
        self._end()
        await asyncio.sleep(1)

    def _end(self) -> None:
        with open(self._file, "w") as cause:
            cause.write("its engine is closed")


class BadSetup:
    async def run(self, x: str) -> str:
        return x

    def setup(self) -> None:
        raise ValueError("the weights are of another model")


class Exits:
    """Ends its process in the ways that role code can."""

    async def hard(self, x: str) -> str:
        os._exit(9)

    async def softly(self, x: str) -> str:
        sys.exit("enough")

    def softly_in_thread(self, x: str) -> str:
        sys.exit("enough")


class Hangs:
    """Never returns; each in its own way."""

    def in_thread(self, x: str) -> str:
        if x == "hang":
            threading.Event().wait()
        return x

    def batch_in_thread(self, x: list[str]) -> list[str]:
        return [self.in_thread(item) for item in x]

    def batch_takes_its_time(self, x: list[str]) -> list[str]:
        time.sleep(1)
        return x

    async def on_loop(self, x: str) -> str:
        if x == "hang":
            while True:
                time.sleep(1)  # noqa: ASYNC251
        return x

    async def with_the_lock(self, x: str) -> str:
        if x == "hang":
            ctypes.PyDLL(None).sleep(1000)
        return x

    async def politely(self, x: str) -> str:
        await asyncio.Event().wait()
        return x


class Spawns:
    """Starts a process of its own that would outlive it."""

    async def run(self, x: str) -> int:
        child = await asyncio.create_subprocess_exec("sleep", "1000")
        return child.pid


class Gather:
    async def run(self, xs: Sequence[str]) -> str:
        return "".join(xs)


def held(**options: Any) -> Graph:
    """A request of it is under way until its client ends the streamed placeholder x."""
    graph = Graph("held")
    x = graph.placeholder("x", Text, stream=True)
    gathered = graph.role("r", Gather, **options).interface("run", inputs=[[{"xs": collect(x)}]], outputs=["y"])
    graph.output(y=gathered.y)
    return graph
