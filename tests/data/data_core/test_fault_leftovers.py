"""After SIGKILL of everything: no memory, no process, no file in the way of the next start."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.messages import L3

from .conftest import Puppet, endpoint_of, keys


def gone(pid: int) -> None:
    """Returns when a process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 60)[0], f"process {pid} lives on"
    os.close(handle)


def named_memory(pid: int) -> bool:
    """Whether a process has open, or mapped, shared memory with a name, which would outlive it."""
    opened = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    return "/dev/shm/" in Path(f"/proc/{pid}/maps").read_text() + " ".join(opened)


def test_a_node_of_which_every_process_was_killed_leaves_nothing_and_starts_again(
    tmp_path: Path, puppet: Callable[[str], Puppet]
) -> None:
    tmp_path.chmod(0o700)
    disk = tmp_path / "ssd"
    disk.mkdir()
    path = str(tmp_path / "m.sock")
    command = [sys.executable, "-m", "omni_flow.data.cli", "serve", "--path", path, "--temp", "4M"]
    command += ["--pool", "name=kv,page=4K,l1=8,l2=32", "--ssd", str(disk), "--ssd-bytes", "16M"]
    command += ["--node", "a", "--control", endpoint_of("tcp", "")]

    def serve() -> tuple[subprocess.Popen[bytes], MemoryManagerClient]:
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "memory manager ready"
        client = MemoryManagerClient(path, name="test")
        while client.stats()["job_movers"] < 3 or not client.stats()["pool_l3_on/kv"]:
            assert not client.wait_end(0.02)
        return process, client

    names = keys(100)
    below: list[np.ndarray] = []
    for _ in range(3):
        process, client = serve()
        with process:
            for name in below[-1:]:
                assert (client.probe("kv", name) & L3).all()
            pages = client.arena("kv/l1", write=True).pages(4096, 8)
            for name in names:
                room = client.reserve("kv", 1, timeout=20)
                pages[room.slots] = name[0]
                client.commit("kv", room.token, name[None])
            doll = puppet(path)
            doll.do("t = TempClient(c); r = t.put(np.zeros(100000)).offset; room = c.reserve('kv', 1)")
            below.append(names[(client.probe("kv", names) & L3) != 0][:20])
            assert len(below[-1]) == 20
            movers = [row["pid"] for row in client.inspect() if row["role"] == "mover"]
            assert len(movers) == 3
            assert not any(map(named_memory, (process.pid, doll.process.pid, *movers)))
            for pid in (process.pid, *movers):
                os.kill(pid, signal.SIGKILL)
            doll.kill()
            client.close()
        for pid in movers:
            gone(pid)
    process, client = serve()
    with process, client:
        assert client.check() == []
        process.terminate()
        assert process.wait(20) == 0
    assert not os.path.exists(path)


def test_processes_whose_manager_was_killed_end_by_themselves(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = str(tmp_path / "m.sock")
    command = [sys.executable, "-m", "omni_flow.data.cli", "serve", "--path", path, "--temp", "4M"]
    command += ["--pool", "name=kv,page=4K,l1=8,l2=32", "--ssd", str(tmp_path), "--ssd-bytes", "16M"]
    command += ["--node", "a", "--control", endpoint_of("tcp", "")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "memory manager ready"
        with MemoryManagerClient(path, role="viewer") as client:
            while client.stats()["job_movers"] < 3:
                assert not client.wait_end(0.02)
            movers = [row["pid"] for row in client.inspect() if row["role"] == "mover"]
        process.kill()
    for pid in movers:
        gone(pid)
