"""What the benchmark and the soak of the server share: the graph that is served, its server, a lean HTTP client."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from omni_flow import Graph, Text, stream

HOST = "127.0.0.1"
TARGET = f"{Path(__file__).resolve()}:graph"


class Echo:
    """The cheapest role there is, and streams of any length."""

    async def say(self, text: str) -> str:
        return text

    async def count(self, number: str) -> AsyncIterator[str]:
        for k in range(int(number)):
            yield f" word{k}"
            if k % 16 == 15:
                await asyncio.sleep(0)

    async def stamp(self, when: str) -> AsyncIterator[str]:
        yield repr(time.time())
        await asyncio.sleep(0.002)
        yield when

    async def wait(self, idle: str) -> AsyncIterator[str]:
        yield "here"
        await asyncio.Event().wait()


graph = Graph("bench")
_echo = graph.role("echo", Echo)
for _name, _method in (("text", "say"), ("number", "count"), ("when", "stamp"), ("idle", "wait")):
    _given = graph.placeholder(_name, Text)
    _out = "out" if _method == "say" else stream("out")
    _made = _echo.interface(_method, inputs=[[_given]], outputs=[_out])
    graph.output(**{_method: _made.out})


# ---- a lean HTTP client -------------------------------------------------------------------------------------


class Wire(asyncio.Protocol):
    """One keep-alive connection. `on_data` sees what comes; `ask` waits for a whole answer with a length."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.waiter: asyncio.Future[bytes] | None = None
        self.on_data: Callable[[bytes], None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.on_data is not None:
            self.on_data(data)
            return
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.buffer[:end]).lower()
        at = head.find(b"\r\ncontent-length: ")
        if at < 0:  # in chunks
            whole = self.buffer.endswith(b"0\r\n\r\n")
        else:
            whole = len(self.buffer) >= end + 4 + int(head[at + 18 :].split(b"\r\n", 1)[0])
        if whole:
            body = bytes(self.buffer[end + 4 :])
            self.buffer.clear()
            assert self.waiter is not None
            if b" 200 " in head[:16]:
                self.waiter.set_result(body)
            else:
                self.waiter.set_exception(SystemExit(f"the server answered {head[:40]!r} {body[:300]!r}"))

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.waiter


def post(port: int, inputs: dict[str, str], **more: Any) -> bytes:
    """The bytes of a native request."""
    output = {"text": "say", "number": "count", "when": "stamp", "idle": "wait"}[next(iter(inputs))]
    body = json.dumps({"inputs": inputs, "outputs": [output], **more}).encode()
    head = f"POST /v1/graphs/bench/requests HTTP/1.1\r\nhost: {HOST}:{port}\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


async def wires(port: int, count: int) -> list[Wire]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Wire, HOST, port))[1] for _ in range(count)]


# ---- the server ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def server() -> AsyncIterator[tuple[int, int]]:
    """`omni-flow serve` of this file's graph in a process group of its own: (port, pid)."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-c",
            "from omni_flow.cli.main import run; run()",
            "serve",
            TARGET,
        ),
        *("--port", "0", "--max-requests", "8192", "--drain", "1", "--log-level", "warning"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        port = 0
        while line := (await process.stderr.readline()).decode():
            if line.startswith("ready at "):
                port = int(line.split()[2].rpartition(":")[2])
                break
        if not port:
            raise SystemExit("the server did not start")
        draining = asyncio.ensure_future(process.stderr.read())
        yield port, process.pid
        draining.cancel()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


def group_mb(leader: int) -> float:
    """Proportional memory of a process and all below it, in MB."""
    total = 0
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    for pid in parents:
        above = pid
        while above in parents and above != leader:
            above = parents[above]
        if above == leader:
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
    return total * 1024 / 1e6
