"""What HTTP costs over the Python client, on this machine's loopback.

The server, its roles and this load generator are processes of their own on the same cores. `--json` prints one object
of numbers, each a median over rounds; `--quick` makes few and short ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
from serve_rig import Wire, graph, group_mb, post, server, wires

import omni_flow
from omni_flow import alaunch
from omni_flow.deploy.local import AsyncDeployment

Ask = Callable[[int], Awaitable[Any]]


async def python_ask(app: AsyncDeployment, number: int) -> None:
    live = app.gateway.submit({"text": "hello"}, outputs=("say",))
    await live.result()


async def latencies(ask: Ask, count: int) -> list[float]:
    found = []
    for number in range(count):
        started = time.perf_counter()
        await ask(number)
        found.append(time.perf_counter() - started)
    return found


async def open_loop(ask: Ask, rate: float, count: int) -> list[float]:
    """Latencies from the time each request was due."""
    found: list[float] = []
    clock = time.perf_counter  # the loop's own has milliseconds
    start = clock() + 0.01

    async def one(number: int, due: float) -> None:
        await ask(number)
        found.append(clock() - due)

    tasks = []
    for number in range(count):
        due = start + number / rate
        delay = due - clock()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.ensure_future(one(number, due)))
    await asyncio.gather(*tasks)
    return found


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


class Lane:
    """Connections that are lent to requests of an open loop."""

    def __init__(self, connections: list[Wire], request: bytes) -> None:
        self._free: asyncio.Queue[Wire] = asyncio.Queue()
        for wire in connections:
            self._free.put_nowait(wire)
        self._request = request

    async def ask(self, number: int) -> None:
        wire = await self._free.get()
        await wire.ask(self._request)
        self._free.put_nowait(wire)


async def closed_loop(connections: list[Wire], request: bytes, seconds: float) -> float:
    """Requests a second."""
    stop = time.perf_counter() + seconds

    async def run(wire: Wire) -> int:
        done = 0
        while time.perf_counter() < stop:
            await wire.ask(request)
            done += 1
        return done

    started = time.perf_counter()
    done = sum(await asyncio.gather(*(run(wire) for wire in connections)))
    return done / (time.perf_counter() - started)


async def sse_rate(port: int, streams: int, frames: int) -> float:
    """Events a second over all streams."""
    loop = asyncio.get_running_loop()
    request = post(port, {"number": str(frames)}, stream=True)
    events, left = 0, streams
    over = loop.create_future()
    connections = await wires(port, streams)

    def reader() -> Callable[[bytes], None]:
        tail = b""

        def on_data(data: bytes) -> None:
            nonlocal tail, events, left
            data = tail + data
            events += data.count(b"event: output")
            tail = data[-12:]
            events -= tail.count(b"event: output")
            if b"event: end" in data:
                left -= 1
                if not left:
                    over.set_result(None)

        return on_data

    started = time.perf_counter()
    for wire in connections:
        wire.on_data = reader()
        wire.transport.write(request)
    await over
    took = time.perf_counter() - started
    for wire in connections:
        wire.transport.close()
    if events != streams * frames:
        raise SystemExit(f"{events} events came, not {streams * frames}")
    return events / took


async def first_byte(port: int, count: int) -> list[float]:
    """Milliseconds from the first frame in the role to its event here."""
    loop = asyncio.get_running_loop()
    (wire,) = await wires(port, 1)
    request = post(port, {"when": "now"}, stream=True)
    found: list[float] = []
    buffer = bytearray()
    came = 0.0
    over = loop.create_future()

    def on_data(data: bytes) -> None:
        nonlocal came
        buffer.extend(data)
        if not came and b'"value":"' in buffer:
            came = time.time()
        if b"event: end" in buffer and buffer.endswith(b"0\r\n\r\n") and not over.done():
            over.set_result(None)

    wire.on_data = on_data
    for _ in range(count):
        over, came = loop.create_future(), 0.0
        buffer.clear()
        wire.transport.write(request)
        await over
        stamp = float(bytes(buffer).split(b'"value":"', 1)[1].split(b'"', 1)[0])
        found.append((came - stamp) * 1000)
    wire.transport.close()
    return found


async def idle(port: int, pid: int, count: int) -> float:
    """MB that idle streams take."""
    request = post(port, {"idle": "yes"}, stream=True)
    before = group_mb(pid)
    connections = await wires(port, count)
    loop = asyncio.get_running_loop()
    here = []
    for wire in connections:
        seen = loop.create_future()

        def on_data(data: bytes, seen: Any = seen) -> None:
            if b"event: output" in data and not seen.done():
                seen.set_result(None)

        wire.on_data = on_data
        wire.transport.write(request)
        here.append(seen)
    await asyncio.gather(*here)
    taken = group_mb(pid) - before
    for wire in connections:
        wire.transport.close()
    return taken


RAY = """
import sys, time, logging, ray
from ray import serve
from starlette.requests import Request

ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)

@serve.deployment(max_ongoing_requests=256)
class Echo:
    async def __call__(self, request: Request):
        return {"say": (await request.json())["inputs"]["text"]}

serve.start(http_options={"host": "127.0.0.1", "port": 18777})
serve.run(Echo.bind(), route_prefix="/v1/graphs/bench/requests")
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


async def ray_rate(python: str, seconds: float) -> float | None:
    """Requests a second of the same trivial role on Ray Serve in `python`; None if that has no Ray Serve."""
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", RAY),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while (line := await process.stdout.readline()) != b"ready\n":
            if not line:
                return None
        connections = await wires(18_777, 64)
        request = post(18_777, {"text": "hello"})
        await closed_loop(connections, request, 2.0)
        return await closed_loop(connections, request, seconds)
    finally:
        process.stdin.close()
        await process.wait()


async def measure(rounds: int, seconds: float, idle_count: int, ray_python: str | None) -> dict[str, float]:
    """All figures: medians over interleaved rounds."""
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    calls = max(100, int(seconds * 300))
    async with alaunch(graph, log_level="WARNING") as app, server() as (port, pid):
        connections = await wires(port, 64)
        request = post(port, {"text": "hello"})
        lane = Lane(connections, request)

        async def direct(number: int) -> None:
            await python_ask(app, number)

        async def single(number: int) -> None:
            await connections[0].ask(request)

        await latencies(direct, 200)
        await latencies(single, 200)
        for _ in range(rounds):
            plain = statistics.median(await latencies(direct, calls)) * 1000
            http = statistics.median(await latencies(single, calls)) * 1000
            note(python_ms=plain, http_ms=http, gateway_overhead_ms=http - plain)
            plain = p99(await open_loop(direct, 500, int(500 * seconds))) * 1000
            http = p99(await open_loop(lane.ask, 500, int(500 * seconds))) * 1000
            note(python_p99_ms=plain, http_p99_ms=http, gateway_p99_c64_ms=http - plain)
            note(requests_per_s=await closed_loop(connections, request, seconds))
            note(sse_events_per_s=await sse_rate(port, 64, int(400 * seconds)))
            note(sse_first_byte_ms=statistics.median(await first_byte(port, calls // 3)))
        note(**{f"idle_sse_{idle_count}_mb": await idle(port, pid, idle_count)})
    if ray_python:
        rate = await ray_rate(ray_python, seconds)
        if rate is not None:
            note(ray_serve_requests_per_s=rate)
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--no-ray", action="store_true", help="leave Ray Serve out")
    parser.add_argument("--ray", default=sys.executable, metavar="PYTHON", help="an interpreter that has Ray Serve")
    options = parser.parse_args()
    rounds, seconds = (1, 0.5) if options.quick else (5, 3.0)
    figures = uvloop.run(measure(rounds, seconds, 2000, None if options.no_ray else options.ray))
    if options.json:
        print(json.dumps(figures))
        return
    about = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"omni-flow {omni_flow.__version__}, {about}; medians of {rounds} rounds")
    for name, value in figures.items():
        print(f"{name:28} {value:12,.3f}")


if __name__ == "__main__":
    main()
