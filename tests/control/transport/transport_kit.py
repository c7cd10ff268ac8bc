"""What the transport tests share: a codec, an inbox to wait on, transports of one kind, peers in processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from omni_flow.control.transport import InprocHub, Transport, make_transport
from omni_flow.control.transport.packets import hello

KEY = "a key that only these tests share"
PEER = Path(__file__).with_name("transport_peer.py")
PATIENCE_S = 30.0
FILES = ["unix", "ipc"]
ENCODED = [*FILES, "tcp", "tcp+key"]
ALL = ["inproc", *ENCODED]
NAME = b"\1ourname"


class ListCodec:
    """Batches are lists of anything msgpack knows."""

    def encode(self, batch: list[Any]) -> bytes:
        return msgspec.msgpack.encode(batch)

    def decode(self, packet: bytes | memoryview) -> list[Any]:
        return msgspec.msgpack.decode(packet, type=list[Any])


class Inbox:
    """Everything that a transport called back, in order: ("batch", sender, messages) and ("lost", peer, cause)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, Any]] = []
        self._waiting: list[asyncio.Future[None]] = []

    def on_batch(self, sender: str, batch: list[Any]) -> None:
        self._add("batch", sender, batch)

    def on_lost(self, peer: str, cause: str) -> None:
        self._add("lost", peer, cause)

    def messages(self, sender: str | None = None) -> list[Any]:
        return [m for kind, who, batch in self.events if kind == "batch" and sender in (None, who) for m in batch]

    def losses(self, peer: str | None = None) -> list[str]:
        return [cause for kind, who, cause in self.events if kind == "lost" and peer in (None, who)]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                changed = asyncio.get_running_loop().create_future()
                self._waiting.append(changed)
                await changed

    async def until_messages(self, count: int, sender: str | None = None) -> list[Any]:
        await self.until(lambda: len(self.messages(sender)) >= count)
        return self.messages(sender)

    async def until_lost(self, peer: str, times: int = 1) -> str:
        await self.until(lambda: len(self.losses(peer)) >= times)
        return self.losses(peer)[-1]

    def _add(self, kind: str, who: str, what: Any) -> None:
        self.events.append((kind, who, what))
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)


class Process:
    """A peer in a process of its own, running `transport_peer.py`."""

    def __init__(self, kind: str, url: str, *arguments: str) -> None:
        key = KEY if kind == "tcp+key" else ""
        command = [sys.executable, str(PEER), url, key, *arguments]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self.address = self._child.stdout.readline().strip()
        assert self.address, "the peer process did not start"

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)
        self.wait()

    def finish(self) -> None:
        """Ask it to close its transport and exit."""
        assert self._child.stdin is not None
        self._child.stdin.close()

    def wait(self) -> int:
        code = self._child.wait(timeout=PATIENCE_S)
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            stream.close()
        return code


class Net:
    """Makes transports of one kind that can reach each other, and closes them."""

    def __init__(self, kind: str, tmp_path: Path) -> None:
        self.kind = kind
        self.directory = tmp_path / "s"
        self.hub = InprocHub()
        self._open: list[Transport] = []
        self._processes: list[Process] = []
        self.strangers: list[Stranger] = []

    def url(self, name: str) -> str:
        match self.kind:
            case "inproc":
                return f"inproc://{name}"
            case "unix" | "ipc":
                return f"{self.kind}://{self.directory}/{name}"
        return "tcp://127.0.0.1:0"

    def nowhere(self) -> str:
        """An address where nobody listens."""
        return "tcp://127.0.0.1:1" if self.kind.startswith("tcp") else self.url("nobody")

    def make(self, name: str) -> Transport:
        key = KEY if self.kind == "tcp+key" else None
        transport = make_transport(self.url(name), ListCodec(), key=key, hub=self.hub)
        self._open.append(transport)
        return transport

    async def start(self, name: str) -> tuple[Transport, Inbox]:
        transport, inbox = self.make(name), Inbox()
        await transport.start(inbox.on_batch, inbox.on_lost)
        return transport, inbox

    def process(self, name: str, *arguments: str) -> Process:
        peer = Process(self.kind, self.url(name), *arguments)
        self._processes.append(peer)
        return peer

    def files(self) -> list[str]:
        return sorted(os.listdir(self.directory)) if self.directory.exists() else []

    async def close(self) -> None:
        for peer in self._processes:
            if peer._child.returncode is None:
                peer.kill()
        for stranger in self.strangers:
            stranger.close()
        for transport in self._open:
            await transport.close(deadline_s=0.0)


async def settle(transport: Transport, inbox: Inbox) -> None:
    """Wait until the transport has sent itself a few messages: whatever else was due has been called back by then."""
    for turn in range(3):
        seen = len(inbox.messages(transport.address))
        transport.send(transport.address, [f"settle {turn}"])
        await inbox.until_messages(seen + 1, transport.address)


def raw_connection(net: Net, address: str) -> socket.socket:
    if net.kind.startswith("tcp"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)))
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if net.kind == "unix" else socket.SOCK_STREAM)
    raw.connect(address.partition("://")[2])
    return raw


async def ended(raw: socket.socket) -> None:
    """Wait until the other side has closed a raw connection."""
    while True:
        try:
            if not await asyncio.wait_for(asyncio.get_running_loop().sock_recv(raw, 4096), PATIENCE_S):
                return
        except ConnectionResetError:
            return


class Stranger:
    """A bare PUSH socket to an address, and a PULL where it says it listens."""

    def __init__(self, net: Net, address: str, name: str = "stranger", listens: bool = True) -> None:
        net.strangers.append(self)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._target = address
        self.push = self.another_push()
        self.pull = self._context.socket(zmq.PULL)
        self.pull.rcvtimeo = 20_000
        if net.kind == "ipc":
            self.address = net.url(name)
            self.pull.bind(self.address)
        else:
            self.address = f"tcp://127.0.0.1:{self.pull.bind_to_random_port('tcp://127.0.0.1')}"
        if not listens:
            self.pull.unbind(self.address)
        self._file = net.directory / name

    def another_push(self) -> "zmq.Socket[bytes]":
        push = self._context.socket(zmq.PUSH)
        push.connect(self._target)
        return push

    def hello(self, name: bytes = NAME, push: "zmq.Socket[bytes] | None" = None) -> None:
        (push or self.push).send_multipart([b"\0hello\0\0" + name, hello(self.address)])

    async def heard(self) -> bytes:
        return await asyncio.to_thread(self.pull.recv)

    async def refused(self) -> bytes:
        """The name of the next channel that it hears is dropped."""
        while not (frame := await self.heard()).startswith(b"\0refused"):
            pass
        return frame[8:16]

    def close(self) -> None:
        """Idempotent; `Net.close` does it to those that are left."""
        self._context.destroy(linger=0)
        self._file.unlink(missing_ok=True)


async def met(net: Net) -> tuple[Transport, Inbox, Stranger]:
    """A transport and a stranger that it takes for a peer."""
    a, inbox = await net.start("a")
    stranger = Stranger(net, a.address)
    stranger.hello()
    stranger.push.send(NAME + ListCodec().encode(["fine"]))
    await inbox.until_messages(1)
    return a, inbox, stranger
