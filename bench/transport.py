"""Round trips and bursts of each transport between two processes on uvloop, beside bare SEQPACKET echoes.

    python bench/transport.py [--rounds 7] [--pings 2000] [--burst 20000]

Every round runs every variant once, in turn. Prints JSON: for each variant the median and the range over the rounds
of the p50 and p99 round trip (one way is half of it) and of the packets a second of a one-way burst. `bare_blocking`
is a blocking recv/send echo of the same bytes without loop or codec; `bare_loop` is uvloop, one add_reader, msgspec
and nothing else. `inproc` stays in one process.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any

import msgspec
import uvloop
import zmq

from omni_flow.control.transport import InprocHub, Transport, make_transport

KEY = "only for this benchmark, on loopback"
BATCH = [["value", "llm.token", [["y", 17]], {"token": 4711}]]
TRANSPORTS = ["unix", "ipc", "tcp", "tcp+key"]


class Codec:
    def __init__(self) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(list[Any]).decode


class Variant(ABC):
    """Something that can be pinged and flooded."""

    @abstractmethod
    async def pings(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips, one after the other."""

    @abstractmethod
    async def burst(self, count: int) -> float:
        """Seconds until the other side has had `count` packets and said so."""


class Seam(Variant):
    """A transport; the other side echoes batches of kind "value" and answers the last of a burst."""

    def __init__(self, transport: Transport, peer: str) -> None:
        self._transport, self._peer = transport, peer
        self._answered = asyncio.get_running_loop().create_future()
        self._samples: list[float] = []
        self._left = 0
        self._sent = 0.0

    def on_batch(self, sender: str, batch: list[Any]) -> None:
        now = time.perf_counter()
        self._samples.append(now - self._sent)
        self._left -= 1
        if self._left > 0:
            self._sent = time.perf_counter()
            self._transport.send(self._peer, BATCH)
        else:
            self._answered.set_result(None)

    async def _exchange(self, first: list[list[Any]], answers: int) -> None:
        self._samples, self._left = [], answers
        self._answered = asyncio.get_running_loop().create_future()
        self._sent = time.perf_counter()
        for batch in first:
            self._transport.send(self._peer, batch)
        await self._answered

    async def pings(self, count: int) -> list[float]:
        await self._exchange([BATCH], count)
        return self._samples

    async def burst(self, count: int) -> float:
        await self._exchange([["silent"]] * (count - 1) + [BATCH], 1)
        return self._samples[0]


class BareLoop(Variant):
    """The least that a loop and a codec cost."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._codec = sock, Codec()

    async def pings(self, count: int) -> list[float]:
        loop, encode, decode = asyncio.get_running_loop(), self._codec.encode, self._codec.decode
        over, samples, sock = loop.create_future(), [], self._sock
        sock.setblocking(False)
        sent = time.perf_counter()

        def readable() -> None:
            nonlocal sent
            decode(sock.recv(65536))
            samples.append(time.perf_counter() - sent)
            if len(samples) < count:
                sent = time.perf_counter()
                sock.send(encode(BATCH))
            else:
                loop.remove_reader(sock)
                over.set_result(None)

        loop.add_reader(sock, readable)
        sock.send(encode(BATCH))
        await over
        return samples

    async def burst(self, count: int) -> float:
        return await asyncio.to_thread(blocking_burst, self._sock, count)


class BareBlocking(Variant):
    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._bytes = sock, Codec().encode(BATCH)

    async def pings(self, count: int) -> list[float]:
        samples = []
        for _ in range(count):
            sent = time.perf_counter()
            self._sock.send(self._bytes)
            self._sock.recv(65536)
            samples.append(time.perf_counter() - sent)
        return samples

    async def burst(self, count: int) -> float:
        return blocking_burst(self._sock, count)


def blocking_burst(sock: socket.socket, count: int) -> float:
    sock.setblocking(True)
    silent, loud = Codec().encode(["silent"]), Codec().encode(BATCH)
    began = time.perf_counter()
    for _ in range(count - 1):
        sock.send(silent)
    sock.send(loud)
    sock.recv(65536)
    return time.perf_counter() - began


# ---------------------------------------------------------------------- the other process


async def echo_transport(url: str, key: str) -> None:
    transport = make_transport(url, Codec(), key=key or None)
    gone = asyncio.Event()

    def on_batch(sender: str, batch: list[Any]) -> None:
        if batch[0] != "silent":
            transport.send(sender, batch)

    await transport.start(on_batch, lambda peer, cause: gone.set())
    print(transport.address, flush=True)
    await gone.wait()
    await transport.close()


async def echo_loop(descriptor: int) -> None:
    sock, codec, gone = socket.socket(fileno=descriptor), Codec(), asyncio.Event()
    sock.setblocking(False)

    def readable() -> None:
        packet = sock.recv(65536)
        if not packet:
            gone.set()
        elif (batch := codec.decode(packet))[0] != "silent":
            sock.send(codec.encode(batch))

    asyncio.get_running_loop().add_reader(sock, readable)
    print("ready", flush=True)
    await gone.wait()


def echo_blocking(descriptor: int) -> None:
    sock, silent = socket.socket(fileno=descriptor), Codec().encode(["silent"])
    print("ready", flush=True)
    while packet := sock.recv(65536):
        if packet != silent:
            sock.send(packet)


# ---------------------------------------------------------------------- the measurement


def spawn(*arguments: str, **options: Any) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, __file__, "--echo", *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


async def measure(rounds: int, pings: int, burst: int) -> dict[str, Any]:
    children: list[subprocess.Popen[str]] = []
    transports: list[Transport] = []
    sockets: list[socket.socket] = []
    variants: dict[str, Variant] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in ("bare_blocking", "bare_loop"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            child, _ = spawn(name, str(theirs.fileno()), pass_fds=[theirs.fileno()])
            theirs.close()
            children.append(child)
            sockets.append(ours)
            variants[name] = BareBlocking(ours) if name == "bare_blocking" else BareLoop(ours)
        hub = InprocHub()
        for kind in ["inproc", *TRANSPORTS]:
            key = KEY if kind == "tcp+key" else None
            urls = [f"{kind}://{directory}/{kind}/{end}" for end in ("here", "there")]
            if kind.startswith("tcp"):
                urls = ["tcp://127.0.0.1:0"] * 2
            elif kind == "inproc":
                urls = ["inproc://here", "inproc://there"]
            here = make_transport(urls[0], Codec(), key=key, hub=hub)
            transports.append(here)
            if kind == "inproc":
                there = make_transport(urls[1], Codec(), hub=hub)
                transports.append(there)
                peer = there.address

                def answer(sender: str, batch: list[Any], there: Transport = there) -> None:
                    if batch[0] != "silent":
                        there.send(sender, batch)

                await there.start(answer, print)
            else:
                child, peer = spawn("transport", urls[1], key or "")
                children.append(child)
            seam = Seam(here, peer)
            variants[kind] = seam
            await here.start(seam.on_batch, print)
        figures: dict[str, dict[str, list[float]]] = {}
        for number in range(rounds + 1):  # the first warms up
            for name, variant in variants.items():
                samples = sorted(await variant.pings(pings))
                took = await variant.burst(burst)
                if number:
                    of = figures.setdefault(name, {"rtt_p50_us": [], "rtt_p99_us": [], "burst_packets_per_s": []})
                    of["rtt_p50_us"].append(samples[len(samples) // 2] * 1e6)
                    of["rtt_p99_us"].append(samples[len(samples) * 99 // 100] * 1e6)
                    of["burst_packets_per_s"].append(burst / took)
        for sock in sockets:
            sock.close()
        for transport in transports:
            await transport.close()
        for child in children:
            child.wait(timeout=10)
    return {name: {what: spread(values) for what, values in of.items()} for name, of in figures.items()}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 1), "min": round(min(values), 1), "max": round(max(values), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pings", type=int, default=2000)
    parser.add_argument("--burst", type=int, default=20000)
    parser.add_argument("--echo", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    match chosen.echo:
        case ["transport", url, key]:
            uvloop.run(echo_transport(url, key))
        case ["bare_loop", descriptor]:
            uvloop.run(echo_loop(int(descriptor)))
        case ["bare_blocking", descriptor]:
            echo_blocking(int(descriptor))
        case _:
            figures = uvloop.run(measure(chosen.rounds, chosen.pings, chosen.burst))
            machine = {
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "uvloop": version("uvloop"),
                "pyzmq": zmq.pyzmq_version(),
                "libzmq": zmq.zmq_version(),
                "msgspec": msgspec.__version__,
                "load_1min": round(os.getloadavg()[0], 1),
            }
            settings = {"rounds": chosen.rounds, "pings": chosen.pings, "burst": chosen.burst, "batch": BATCH}
            print(json.dumps({"machine": machine, "settings": settings, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
