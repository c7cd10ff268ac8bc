"""Real memory managers in processes of their own, and real clients to kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError
from omni_flow.data.launch import start
from omni_flow.data.link import UnixLink
from omni_flow.data.messages import Hello
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.protocol import ERROR, Failure, Op, encode
from omni_flow.data.server_config import ServerConfig

from .movers_rig import DEEP, FakeDisk


class Manager:
    """A running memory manager. `address` is where its clients connect: its path, or a ZMQ endpoint of it."""

    def __init__(self, config: ServerConfig, address: str = "") -> None:
        self.config = config
        self.address = address or config.path
        self.process = start(config, log=config.path + ".log")

    @property
    def path(self) -> str:
        return self.config.path

    @property
    def log(self) -> str:
        return Path(self.config.path + ".log").read_text()

    def client(self, **options: Any) -> MemoryManagerClient:
        return MemoryManagerClient(self.address, **options)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def again(self) -> None:
        self.process = start(self.config, log=self.config.path + ".log")

    def settle(self) -> None:
        """Wait until the sessions of killed processes have ended and every ended one has been taken back."""
        with self.client(name="settle", role="viewer") as client:
            while client.stats()["reclaims_running"] or any(map(_is_gone, client.inspect())):
                client.ping()

    def end(self) -> None:
        """Not to be left behind, whatever has failed."""
        if self.process.poll() is None:
            self.kill()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(20) == 0, self.log


def _is_gone(row: dict[str, Any]) -> bool:
    """Whether the process of a session has gone, which over ZMQ the server need not have seen yet."""
    return row["pid"] != 0 and not os.path.exists(f"/proc/{row['pid']}")


class Make(Protocol):
    """Starts a manager; `made` lists those started."""

    made: list[Manager]

    def __call__(self, **options: Any) -> Manager: ...


def hello(link: UnixLink) -> int:
    """Register over a bare connection; returns the epoch."""
    link.send(encode(Op.HELLO, 0, 1, 0, Hello("client", "raw")))
    while True:
        answer = link.receive(10)
        assert answer is not None
        if answer.op == Op.HELLO and not answer.flags & ERROR:
            return answer.epoch


def failure(link: UnixLink) -> str:
    """Code of the error that comes next."""
    answer = link.receive(10)
    assert answer is not None
    assert answer.flags & ERROR
    return answer.body(Failure).code


TRANSPORTS = ("unix", "ipc", "tcp")


@pytest.fixture
def transport() -> str:
    """How clients reach the managers of a test; modules that hold over each transport parametrize it."""
    return "unix"


def endpoint_of(transport: str, folder: str) -> str:
    """A free ZMQ endpoint."""
    if transport == "ipc":
        return f"ipc://{folder}/zmq"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def manager(transport: str) -> Iterator[Make]:
    """Starts managers; at the end each that still lives must be sound and end on SIGTERM."""
    made: list[Manager] = []
    with tempfile.TemporaryDirectory(prefix="omni") as folder:

        def make(**options: Any) -> Manager:
            path = os.path.join(folder, f"{len(made)}", "memory.sock")
            os.mkdir(os.path.dirname(path), 0o700)
            options.setdefault("pools", (PoolSpec(name="kv", page_bytes=64, l1_pages=256),))
            options.setdefault("huge", False)
            address = ""
            if transport != "unix":
                address = endpoint_of(transport, os.path.dirname(path))
                options["endpoints"] = (address,)
            one = Manager(ServerConfig(path=path, **options), address)
            made.append(one)
            return one

        make.made = made  # type: ignore[attr-defined]
        yield make
        with contextlib.ExitStack() as ends:
            for one in made:
                ends.callback(one.end)
            for one in made:
                if one.process.poll() is None:
                    with one.client(role="viewer") as client:
                        assert client.check() == []
                        assert client.stats()["internal_errors"] == 0, one.log
                    one.close()


def keys(n: int) -> NDArray[np.uint8]:
    """Fresh keys."""
    return np.frombuffer(os.urandom(32 * n), np.uint8).reshape(n, 32)


def store(client: MemoryManagerClient, names: NDArray[np.uint8], pool: str = "kv", **options: Any) -> None:
    """Reserve, write nothing, commit."""
    room = client.reserve(pool, len(names), timeout=5)
    client.commit(pool, room.token, names, **options)


def poll_timeout(pid: int) -> int | None:
    """Milliseconds for which a process is in epoll_wait (the fourth argument), -1: without end; None: it is not."""
    call = Path(f"/proc/{pid}/syscall").read_text().split()
    if len(call) < 5:
        return None
    timeout = int(call[4], 16) & 0xFFFFFFFF
    return -1 if timeout == 0xFFFFFFFF else timeout


class Puppet:
    """A client process that executes lines of Python, one answer a line; `c` is its client, `t` its TempClient."""

    PROGRAM = """
import sys
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.temp_client import TempClient, encode_ref, decode_ref
import numpy as np
space = {"np": np, "encode_ref": encode_ref, "decode_ref": decode_ref, "TempClient": TempClient}
space["c"] = MemoryManagerClient(sys.argv[1], name="puppet")
print("ready", flush=True)
for line in sys.stdin:
    try:
        exec(line.strip(), space)
        print(repr(space.get("r")), flush=True)
    except BaseException as error:
        print("!", type(error).__name__, error, flush=True)
"""

    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, line: str) -> None:
        """Execute a line without waiting for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def do(self, line: str) -> str:
        """Execute a line; returns the repr of its variable `r`."""
        self.send(line)
        answer = self._line()
        if answer.startswith("!"):
            raise DataError(answer)
        return answer

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def disk(manager: Make) -> Iterator[tuple[Manager, FakeDisk]]:
    """A manager of three tiers, and its disk."""
    server = manager(pools=(DEEP,))
    fake = FakeDisk(server.path)
    yield server, fake
    fake.close()


@pytest.fixture
def puppet() -> Iterator[Callable[[str], Puppet]]:
    """Makes puppets; those alive at the end are killed."""
    made: list[Puppet] = []

    def make(address: str) -> Puppet:
        made.append(Puppet(address))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.kill()
