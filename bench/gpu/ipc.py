"""Device arenas between processes, by virtual memory and by CUDA IPC: `python bench/gpu/ipc.py [--json] [--out FILE]`.

For each way of sharing: a memory manager with 1 GiB of L1 on the GPU and two clients (`ipc_role.py`). Checked: both see
the same bytes and the same memory, a writer killed leaves them, what it held comes back, a mapping made for reading
can't be written (virtual memory) or says that it can (CUDA IPC), a manager or owner killed leaves no process and no
memory behind. Printed beside: the device memory a manager costs beyond its arena, the time until it serves and that of
a mapping, copies out of the mapping and within one process. Needs one NVIDIA GPU and torch, about 40 s.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checks import Checks, device_mib, device_says, device_settles

from omni_flow.data import cuda
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.device_memory import Sharing
from omni_flow.data.launch import start
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

PAGE = 2 << 20
PAGES = 512
STORED = 16
WAYS: tuple[Sharing, ...] = ("vmm", "ipc")
SLACK_MIB = 16.0
ANSWER_S = 60.0


class Role:
    """A client process."""

    def __init__(self, path: str, mode: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("ipc_role.py")), path, mode, str(PAGE)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            RuntimeError: it has ended, or says nothing.
        """
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"a client said nothing within {ANSWER_S} s, or has ended: {self.process.poll()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, *words: object) -> dict[str, Any]:
        """Its answer to a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.process.kill()
        self.process.wait()


class Manager:
    """A memory manager with an arena on the device, in a folder of its own."""

    def __init__(self, folder: Path, sharing: Sharing) -> None:
        folder.mkdir()
        self.path = str(folder / "m.sock")
        self._log = folder / "log"
        pool = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=PAGES, l1_device=0)
        began = time.perf_counter()
        config = ServerConfig(path=self.path, pools=(pool,), device_memory=sharing)
        self.process = start(config, log=str(self._log))
        self.start_ms = round((time.perf_counter() - began) * 1e3)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def owners(self) -> list[int]:
        """Its owner processes; nothing else is started by it here."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.process.kill()
        self.process.wait()


def has_ended(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([fd], [], [], seconds)
    os.close(fd)
    return bool(ready)


def sharing_works(way: Sharing, manager: Manager, writer: Role, reader: Role, checks: Checks) -> tuple[int, str]:
    """Both clients over one memory; returns a slot they have used, and the keys of the pages."""
    hello, other = writer.hear(), reader.hear()
    kind = hello["kind"] == other["kind"] == f"cuda-{way}"
    enforced = hello["enforced"] == other["enforced"] == (way == "vmm")
    ms = (hello["map_ms"], other["map_ms"])
    checks.check(f"{way}: both clients map it", kind and enforced, map_ms=ms, readonly_enforced=other["enforced"])
    stored = writer.ask("store", 1, STORED)
    found = reader.ask("find", 1, stored["keys"])
    checks.check(f"{way}: both see the same bytes", found == {"pages": STORED, "same": True}, **found)
    slot = int(stored["slots"][0])
    used = device_mib()
    writer.ask("fill", slot, 99)
    seen = reader.ask("same", slot, 99)
    checks.check(f"{way}: what is written later is seen without a copy", seen == {"same": True}, **seen)
    writer.ask("fill", slot, 1)
    grown = device_mib() - used
    checks.check(f"{way}: handing over takes no memory", grown <= SLACK_MIB, grown_mib=grown)
    rates = reader.ask("rates")
    checks.check(f"{way}: copies out of the mapping", "error" not in rates, **rates)
    return slot, str(stored["keys"])


def writer_killed(way: Sharing, manager: Manager, writer: Role, reader: Role, keys: str, checks: Checks) -> None:
    """SIGKILL of a client that holds pages and has the arena mapped."""
    writer.ask("hold")
    with MemoryManagerClient(manager.path, name="ipc", role="viewer") as client:
        pid = writer.process.pid
        began = time.perf_counter()
        writer.kill()
        while any(row["pid"] == pid for row in client.inspect()) or client.stats()["reclaims_running"]:
            if client.wait_end(0.001):
                break
        ms = round((time.perf_counter() - began) * 1e3, 1)
        stats = client.stats()
        sound = not stats["pool_reservations/kv"] and not client.check()
    checks.check(f"{way}: a killed writer's pages come back", sound, ms=ms)
    found = reader.ask("find", 1, keys)
    checks.check(f"{way}: what it wrote stays", found == {"pages": STORED, "same": True}, **found)


def reading_only(way: Sharing, slot: int, reader: Role, checks: Checks) -> None:
    """A write through a mapping made for reading. By virtual memory it costs the client its context."""
    try:
        said = reader.ask("fill", slot, 7)
    except RuntimeError as ended:
        said = {"error": str(ended)}
    refused = "error" in said
    checks.check(f"{way}: a write through a mapping made for reading", refused == (way == "vmm"), said=said)


def ends(way: Sharing, manager: Manager, folder: Path, reader: Role, slot: int, checks: Checks) -> None:
    """SIGKILL of the manager and of its owner process."""
    if way == "vmm":
        checks.check("vmm: no owner process", not manager.owners())
        manager.kill()
        seen = reader.ask("same", slot, 1)
        checks.check("vmm: a client's mapping outlives the manager", seen == {"same": True}, **seen)
        return
    (owner,) = manager.owners()
    os.kill(owner, signal.SIGKILL)
    status = manager.process.wait(20)
    named = f"process {owner}" in manager.log
    checks.check("ipc: the manager ends with its owner and names it", status == 1 and named, status=status)
    said = reader.ask("ping")
    checks.check("ipc: clients are told", said["error"] in ("Disconnected", "StaleEpoch"), **said)
    again = Manager(folder, way)
    (owner,) = again.owners()
    again.kill()
    checks.check("ipc: the owner ends with a killed manager", has_ended(owner))


def one_way(way: Sharing, work: Path, checks: Checks) -> None:
    """Everything for one way of sharing."""
    before = device_mib()
    manager = Manager(work / way, way)
    beyond = device_mib() - before - PAGES * PAGE / (1 << 20)
    owners = len(manager.owners())
    served = owners == (way == "ipc")
    checks.check(f"{way}: the manager serves", served, start_ms=manager.start_ms, mib_beyond_arena=beyond)
    writer, reader = Role(manager.path, "write"), Role(manager.path, "read")
    try:
        slot, keys = sharing_works(way, manager, writer, reader, checks)
        writer_killed(way, manager, writer, reader, keys, checks)
        if way == "ipc":
            reading_only(way, slot, reader, checks)
        ends(way, manager, work / f"{way}-again", reader, slot, checks)
        if way == "vmm":
            reading_only(way, slot, reader, checks)
    finally:
        for role in (writer, reader):
            role.kill()
        manager.kill()
        after = device_settles(before + SLACK_MIB)
        back = after <= before + SLACK_MIB
        checks.check(f"{way}: memory of the device is back", back, before_mib=before, after_mib=after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the lines on stderr")
    parser.add_argument("--out", help="write the JSON object here after each check")
    options = parser.parse_args()
    if not cuda.available():
        sys.exit("no CUDA device")
    checks = Checks(options.json, options.out, device_says("name,driver_version"))
    checks.check("the device says how it shares memory", True, exports_descriptors=cuda.exports_descriptors(0))
    with tempfile.TemporaryDirectory(prefix="omni-ipc") as folder:
        for way in WAYS:
            with checks.step(way):
                one_way(way, Path(folder), checks)
    if options.json:
        print(json.dumps(checks.summary()))
    sys.exit(checks.status)


if __name__ == "__main__":
    main()
