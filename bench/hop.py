"""What a hop costs: `python bench/hop.py --json`. Roles that do nothing, one process each, Unix SEQPACKET.

A hop is a third of the difference between chains of four roles and of one. `hop_header_us` carries an int. In the rows
of arrays a role in front of the chain makes the first one, so that the client copies none in. `hop_<size>_us`: each
role answers with an array of that size from its own ordinary memory, so that each hop copies one into the arena.
`hop_inplace_<size>_us`: the array lies where its reader finds it; the bytes are not touched. `hop_inplace_us`: that of
the slowest size.
`hop_forward_us`: each role gives on the 16 MiB it got.

Runs of the compared graphs are interleaved; every figure is the median of rounds, with the quartiles in the long form.
The floors of the same machine and run (bare SEQPACKET echo between two processes, memcpy) are measured in between.

There are two floors of a copy. In a chain of four each role is woken to copy its own array into a slot of its own, and
all the others run between two copies from one source. `floor_memcpy_<size>_us` is the copy under these conditions: what
a turn through `Ring`, four bare processes that do just that, takes longer with the copies than without, for one of
them. It is what a hop is held against: `hop_<size>_ratio` = hop / (header hop + that floor).
`floor_memcpy_warm_<size>_us` copies one array into one other again and again, so that a MiB stays in the second-level
cache of one core; `hop_<size>_ratio_warm` is the ratio to that.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import mmap
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import hop_roles
import numpy as np
import uvloop

import omni_flow
from omni_flow.control.runtime.client import AsyncSession
from omni_flow.control.runtime.inprocess import InProcess

SIZES = {"64kib": 64 << 10, "1mib": 1 << 20, "16mib": 16 << 20}
LONG = 4
"""Roles of the longer chains."""
HUGE_PAGE = 2 << 20
NO_COPY = 255
"""Says to `Ring`: pass it on without a copy."""

Samples = dict[str, list[float]]


async def request_us(session: Any) -> float:
    """One request through a chain, in microseconds."""
    begun = time.perf_counter()
    await (await session.submit(x=1)).result()
    return (time.perf_counter() - begun) * 1e6


async def p50_us(session: Any, requests: int) -> float:
    return statistics.median([await request_us(session) for _ in range(requests)])


async def array_p50_us(session: Any, nbytes: int, requests: int) -> float:
    """Median of requests whose roles hand on arrays of that size, in microseconds."""
    times = []
    for _ in range(requests):
        begun = time.perf_counter()
        await (await session.submit(n=nbytes)).result()
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


def memcpy_us(nbytes: int, rounds: int = 15) -> float:
    """Floor: one copy between two arrays of this process, warm."""
    source, target = np.full(nbytes, 1, np.uint8), np.full(nbytes, 2, np.uint8)  # pages of their own
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


class Ring:
    """Floor: processes in a ring. Each is woken by a packet, copies an array of ordinary memory of its own into one of
    huge pages, as a slot has them, and sends the packet on; the last one to us. End it with `close`."""

    def __init__(self, processes: int, sizes: Sequence[int]) -> None:
        links = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(processes + 1)]
        self._processes = [self._fork(links, k, sizes) for k in range(processes)]
        self._first, self._last = links[0][0], links[-1][1]
        self._close_others(links, self._first, self._last)

    @classmethod
    def _fork(cls, links: Sequence[tuple[socket.socket, socket.socket]], k: int, sizes: Sequence[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            receiving, sending = links[k][1], links[k + 1][0]
            cls._close_others(links, receiving, sending)
            pairs = [(np.full(nbytes, 1, np.uint8), huge_array(nbytes)) for nbytes in sizes]
            while packet := receiving.recv(1):
                for source, target in pairs[packet[0] : packet[0] + 1]:
                    np.copyto(target, source)
                sending.send(packet)
        finally:
            os._exit(0)

    @staticmethod
    def _close_others(links: Sequence[tuple[socket.socket, socket.socket]], *keep: socket.socket) -> None:
        for end in itertools.chain.from_iterable(links):
            if end not in keep:
                end.close()

    def _turn_us(self, what: int) -> float:
        begun = time.perf_counter()
        self._first.send(bytes([what]))
        self._last.recv(1)
        return (time.perf_counter() - begun) * 1e6

    def copy_us(self, size: int, turns: int = 30) -> float:
        """What the copy of the size of that index costs one process, in microseconds."""
        both = [(self._turn_us(size), self._turn_us(NO_COPY)) for _ in range(turns)]
        copying, bare = (statistics.median(times) for times in zip(*both, strict=True))
        return (copying - bare) / len(self._processes)

    def close(self) -> None:
        """End the processes."""
        self._first.close()
        for pid in self._processes:
            os.waitpid(pid, 0)
        self._last.close()


def huge_array(nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes on huge pages, where the system has them."""
    memory = mmap.mmap(-1, max(nbytes, HUGE_PAGE))
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8, nbytes)
    array[:] = 2
    return array


async def throughput(session: Any, clients: int, each: int) -> float:
    """Requests per second of `clients` closed loops."""

    async def client() -> None:
        for _ in range(each):
            await (await session.submit(x=1)).result()

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return clients * each / (time.perf_counter() - begun)


async def cancel_ms(app: Any, session: Any) -> float:
    """From `cancel()` of a request with open streams to the census of all its processes reading zero."""
    request = await session.submit(n=1)
    while min(held["running"] for held in (await app.census()).values()) == 0:
        pass
    begun = time.perf_counter()
    await request.cancel()
    while any(any(held.values()) for held in (await app.census()).values()):
        pass
    return (time.perf_counter() - begun) * 1e3


def echo_us(rounds: int = 2000) -> float:
    """Floor: round trip of 64 bytes over SEQPACKET between two processes, blocking; half of it is one hop."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        while packet := theirs.recv(256):
            theirs.send(packet)
        os._exit(0)
    theirs.close()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        ours.send(b"x" * 64)
        ours.recv(256)
        times.append((time.perf_counter() - begun) * 1e6)
    ours.close()
    os.waitpid(pid, 0)
    return statistics.median(times)


async def measure(rounds: int) -> Samples:
    """All figures, `rounds` samples each, interleaved."""
    samples: Samples = {}

    def note(key: str, value: float) -> None:
        samples.setdefault(key, []).append(value)

    for _ in range(3):
        note("floor_seqpacket_round_trip_us", echo_us())
    async with AsyncExitStack() as stack:
        ring = Ring(LONG, list(SIZES.values()))
        stack.callback(ring.close)

        async def launch(graph: omni_flow.Graph) -> Any:
            return await stack.enter_async_context(omni_flow.alaunch(graph))

        one, four = await launch(hop_roles.chain(1)), await launch(hop_roles.chain(LONG))
        diamond, paced = await launch(hop_roles.diamond()), await launch(hop_roles.paced())
        burst, held = await launch(hop_roles.burst()), await launch(hop_roles.held())
        copying, placing, forwarding = [
            [(await launch(hop_roles.arrays(length, cls))).session() for length in (1, LONG)]
            for cls in (hop_roles.Copied, hop_roles.InPlace, hop_roles.Identity)
        ]
        inproc = []
        for length in (1, LONG):
            app = InProcess(hop_roles.chain(length).compile())
            await app.start()
            stack.push_async_callback(app.close)
            inproc.append(AsyncSession(app.gateway))
        sessions = {name: app.session() for name, app in locals().items() if hasattr(app, "session")}
        for session in (*inproc, sessions["one"], sessions["four"], sessions["diamond"]):
            await p50_us(session, 200)

        async def hops() -> None:
            short, long = await p50_us(sessions["one"], 150), await p50_us(sessions["four"], 150)
            note("chain1_us", short)
            note("chain4_us", long)
            note("hop_header_us", (long - short) / (LONG - 1))

        async def inproc_hops() -> None:
            short, long = [await p50_us(session, 300) for session in inproc]
            note("hop_inproc_us", (long - short) / (LONG - 1))

        async def load() -> None:
            note("chain4_c32_rps", await throughput(sessions["four"], 32, 100))

        async def diamonds() -> None:
            note("diamond_us", await p50_us(sessions["diamond"], 150))

        async def chunks() -> None:
            late = (await (await sessions["paced"].submit(n=100)).result())["late"]
            note("stream_chunk_us", statistics.median(late) * 1e6)

        async def bursts() -> None:
            frames = 20_000
            span = (await (await sessions["burst"].submit(n=frames)).result())["span"]
            note("stream_burst_per_s", frames / span)

        async def cancels() -> None:
            note("cancel_free_ms", statistics.median([await cancel_ms(held, sessions["held"]) for _ in range(10)]))

        async def array_hop(sessions: list[Any], nbytes: int) -> float:
            short, long = [await array_p50_us(session, nbytes, 50) for session in sessions]
            return (long - short) / (LONG - 1)

        async def array_hops() -> None:
            for k, (name, nbytes) in enumerate(SIZES.items()):
                hop, header = await array_hop(copying, nbytes), samples["hop_header_us"][-1]
                floor, warm = ring.copy_us(k), memcpy_us(nbytes)
                note(f"hop_{name}_us", hop)
                note(f"floor_memcpy_{name}_us", floor)
                note(f"floor_memcpy_warm_{name}_us", warm)
                note(f"hop_{name}_ratio", hop / (header + floor))
                note(f"hop_{name}_ratio_warm", hop / (header + warm))
                note(f"hop_inplace_{name}_us", await array_hop(placing, nbytes))
            note("hop_forward_us", await array_hop(forwarding, SIZES["16mib"]))

        figures: list[Callable[[], Awaitable[None]]] = [
            hops,
            inproc_hops,
            load,
            diamonds,
            chunks,
            bursts,
            cancels,
            array_hops,
        ]
        for _ in range(rounds):
            for figure in figures:
                await figure()
                print(f"{figure.__name__}: round done", file=sys.stderr)
    in_place = [samples[f"hop_inplace_{name}_us"] for name in SIZES]
    samples["hop_inplace_us"] = max(in_place, key=statistics.median)
    return samples


def describe(samples: Samples) -> dict[str, Any]:
    """Medians with quartiles, and the machine."""
    figures = {}
    for key, values in samples.items():
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        figures[key] = {"median": statistics.median(values), "quartiles": quartiles, "samples": len(values)}
    machine = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "uvloop": uvloop.__version__,
        "load": os.getloadavg()[0],
    }
    return {"machine": machine, "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object of medians on stdout")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    samples = uvloop.run(measure(options.rounds))
    if options.json:
        print(json.dumps({key: statistics.median(values) for key, values in samples.items()}))
        return
    found = describe(samples)
    print(json.dumps(found["machine"]))
    for key, figure in found["figures"].items():
        low, _, high = figure["quartiles"]
        print(f"{key:32} {figure['median']:12.2f}   quartiles {low:.2f} .. {high:.2f}   n={figure['samples']}")


if __name__ == "__main__":
    main()
