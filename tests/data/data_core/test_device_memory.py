"""L1 on a device between real processes: by CUDA virtual memory, and by CUDA IPC where that can't be had."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_flow.data import cuda_owner
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.device_memory import DeviceMemory
from omni_flow.data.errors import BadArgument, DataError, Disconnected, SystemRefusal
from omni_flow.data.launch import load_config
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

SCRIPT = str(Path(__file__).parent.parent / "weights" / "device_of_host_memory.py")
POOL = PoolSpec(name="kv", page_bytes=1 << 20, l1_pages=3, l1_device=0)


class DeviceManager:
    """A memory manager on a driver made of host memory."""

    def __init__(self, folder: Path, sharing: str, exports: str) -> None:
        self.path = str(folder / "m.sock")
        self._log = folder / "log"
        config = ServerConfig(path=self.path, pools=(POOL,), device_memory=sharing)
        read, write = os.pipe()
        command = [sys.executable, SCRIPT, "serve", msgspec.json.encode(config).decode(), "--ready-fd", str(write)]
        environment = os.environ | {"STAND_IN_EXPORTS": exports}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, pass_fds=(write,), stderr=log, env=environment)
        os.close(write)
        with open(read, "rb") as ready:
            self.started = bool(ready.readline())

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def owner(self) -> int:
        """Process id of its owner process."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)


class Role:
    """A process that maps the arena; its answers are JSON lines."""

    def __init__(self, path: str, *flags: str) -> None:
        command = [sys.executable, SCRIPT, "pool", path, *flags]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.hello = self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the role ended with {self.process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self._hear()

    def end(self) -> str:
        """End it; returns what it wrote to stderr."""
        return self.process.communicate()[1]


def ends(pid: int) -> bool:
    """Whether a process ends, waited for by pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([fd], [], [], 20)
    os.close(fd)
    return bool(ready)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Callable[..., DeviceManager]]:
    made: list[DeviceManager] = []

    def make(sharing: str, exports: str = "yes") -> DeviceManager:
        made.append(DeviceManager(tmp_path, sharing, exports))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.process.terminate()
            assert one.process.wait(20) == 0, one.log


@pytest.fixture
def role() -> Iterator[Callable[..., Role]]:
    made: list[Role] = []

    def make(path: str, *flags: str) -> Role:
        made.append(Role(path, *flags))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("sharing", ["vmm", "ipc"])
def test_processes_that_map_an_arena_on_a_device_see_the_same_bytes(
    manager: Callable[..., DeviceManager], role: Callable[..., Role], sharing: str
) -> None:
    path = manager(sharing).path
    writer, reader = role(path), role(path, "read")
    assert writer.hello == reader.hello == {"kind": f"cuda-{sharing}", "enforced": sharing == "vmm", "size": 4 << 20}
    assert writer.ask("put 7") == {"put": 7}
    assert reader.ask("get") == {"got": [7]}
    writer.process.kill()
    assert reader.ask("get") == {"got": [7]}
    assert reader.ask("close") == {"mapped": 0}


def test_a_reader_of_virtual_memory_cannot_write(
    manager: Callable[..., DeviceManager], role: Callable[..., Role]
) -> None:
    reader = role(manager("vmm").path, "read")
    reader.tell("put 1")
    assert reader.process.wait(20) == -signal.SIGSEGV


def test_a_reader_over_cuda_ipc_can_write_and_is_told_so_once(
    manager: Callable[..., DeviceManager], role: Callable[..., Role]
) -> None:
    reader = role(manager("ipc").path, "read")
    assert reader.ask("put 1") == {"put": 1}
    assert reader.end().count("read-only mappings can be written") == 1


@pytest.mark.parametrize("exports", ["no", "fails"])
def test_a_device_that_cannot_export_descriptors_is_shared_by_cuda_ipc_and_the_log_says_why(
    manager: Callable[..., DeviceManager], role: Callable[..., Role], exports: str
) -> None:
    one = manager("auto", exports)
    assert role(one.path).hello["kind"] == "cuda-ipc"
    assert "shared by CUDA IPC" in one.log
    assert ("cuMemCreate" in one.log) == (exports == "fails")


def test_a_device_that_can_export_descriptors_has_no_owner_process(
    manager: Callable[..., DeviceManager], role: Callable[..., Role]
) -> None:
    one = manager("auto")
    assert role(one.path).hello["kind"] == "cuda-vmm"
    assert not Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text()


def test_a_manager_that_must_use_virtual_memory_does_not_start_without(manager: Callable[..., DeviceManager]) -> None:
    one = manager("vmm", "fails")
    assert not one.started
    assert one.process.wait(20) == 1
    assert "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED" in one.log


def test_the_death_of_the_owner_ends_the_manager_which_names_it(
    manager: Callable[..., DeviceManager], role: Callable[..., Role]
) -> None:
    one = manager("ipc")
    owner, mapped = one.owner, role(one.path)
    with MemoryManagerClient(one.path, role="viewer") as client:
        os.kill(owner, signal.SIGKILL)
        assert client.wait_end(20)
    assert one.process.wait(20) == 1
    assert f"the owner of the memory of device 0 (process {owner}) has ended" in one.log
    with pytest.raises(Disconnected):
        MemoryManagerClient(one.path)
    assert mapped.process.poll() is None


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_owner_ends_with_its_manager(manager: Callable[..., DeviceManager], end: signal.Signals) -> None:
    one = manager("ipc")
    owner = one.owner
    one.process.send_signal(end)
    one.process.wait(20)
    assert ends(owner)


def test_an_owner_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = "import socket, sys\nsock = socket.socket(fileno=int(sys.argv[1]))\nwhile sock.recv(4096): pass"
    monkeypatch.setattr(cuda_owner, "ANSWER_S", 0.2)
    owner = cuda_owner.Owner(0, (sys.executable, "-c", silent))
    assert not select.select([owner], [], [], 0)[0]
    for _ in range(2):
        with pytest.raises(SystemRefusal, match=r"process \d+\) has ended, or not answered for 0.2 s"):
            owner.allocate(2 << 20)
        assert select.select([owner], [], [], 0)[0]
    assert owner.process.wait(20) == 0
    owner.close()


def memory_of(owner: int) -> int:
    """How many pieces of device memory an owner process has."""
    links = []
    for link in Path(f"/proc/{owner}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(link))
    return sum("stand-in-device" in link for link in links)


def test_memory_that_cannot_be_shared_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_EXPORTS", "nothing")
    owner = cuda_owner.Owner(0, (sys.executable, SCRIPT, "owner"))
    for _ in range(2):
        with pytest.raises(SystemRefusal, match="cuIpcGetMemHandle"):
            owner.allocate(2 << 20)
    assert memory_of(owner.process.pid) == 0
    owner.close()


@contextlib.contextmanager
def loader_of(one: DeviceManager, *, stopped: bool) -> Iterator[subprocess.Popen[str]]:
    """A role that wants weights on the device, whose owner process may be stopped."""
    owner, pipe = one.owner, subprocess.PIPE
    if stopped:
        os.kill(owner, signal.SIGSTOP)
    with subprocess.Popen([sys.executable, SCRIPT, "role", one.path], stdin=pipe, stdout=pipe, text=True) as loader:
        try:
            yield loader
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner, signal.SIGCONT)
            loader.kill()


def loaded(loader: subprocess.Popen[str]) -> dict[str, Any]:
    """What a loader says when it has its weights."""
    assert loader.stdout is not None
    answer: dict[str, Any] = json.loads(loader.stdout.readline())
    return answer


def wait_until(client: MemoryManagerClient, name: str, value: int) -> None:
    while client.stats()[name] != value:
        assert not client.wait_end(0.02)


def test_the_manager_serves_others_while_an_owner_is_slow(manager: Callable[..., DeviceManager]) -> None:
    one = manager("ipc")
    with loader_of(one, stopped=True) as loader, MemoryManagerClient(one.path, timeout=20.0) as client:
        wait_until(client, "weight_loading", 2)
        assert len(client.reserve("kv", 3).slots) == 3
        assert memory_of(one.owner) == 1
        os.kill(one.owner, signal.SIGCONT)
        assert loaded(loader) == {"loaded": 2, "right": True, "rotten": 0}
        assert client.check() == []


def test_memory_that_comes_when_its_loader_has_gone_is_given_back(manager: Callable[..., DeviceManager]) -> None:
    one = manager("ipc")
    with loader_of(one, stopped=True) as loader, MemoryManagerClient(one.path, timeout=20.0) as client:
        wait_until(client, "weight_loading", 2)
        loader.kill()
        wait_until(client, "weight_loading", 0)
        os.kill(one.owner, signal.SIGCONT)
        with loader_of(one, stopped=False) as again:
            assert loaded(again)["right"]
            while memory_of(one.owner) != 2:
                assert not client.wait_end(0.02)
        assert client.check() == []


def test_an_owner_that_stays_silent_ends_a_running_manager(
    manager: Callable[..., DeviceManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_ANSWER_S", "5")
    one = manager("ipc")
    with loader_of(one, stopped=True), MemoryManagerClient(one.path, role="viewer") as client:
        assert client.wait_end(60)
    assert one.process.wait(20) == 1
    assert "has ended, or not answered for 5 s" in one.log


def test_a_device_that_is_not_there_gets_no_owner_process() -> None:
    watched: list[int] = []
    memory = DeviceMemory("ipc", lambda fd, _call: watched.append(fd), lambda _error: None)
    with pytest.raises(SystemRefusal):
        memory.create("one", 2 << 20, 99)
    assert watched == []
    memory.close()


def test_a_config_with_another_way_of_sharing_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"path": "m.sock", "device_memory": "fabric"}')
    with pytest.raises(DataError, match="Invalid enum value 'fabric'"):
        load_config(str(config))


def test_an_arena_on_a_device_cannot_be_mapped_as_cpu_memory(manager: Callable[..., DeviceManager]) -> None:
    with MemoryManagerClient(manager("ipc").path) as client, pytest.raises(BadArgument, match="lies on device 0"):
        client.arena("kv/l1")
