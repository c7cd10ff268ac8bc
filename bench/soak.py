"""Soak of the data plane: `python bench/soak.py --minutes M [--seed S] [--out docs/soak_data.md]`.

A memory manager with three tiers at full occupancy, four clients (`soak_worker.py`), and a hand that kills clients
and movers, stops the SSD mover for a while, flips bits in its files and cuts them short. Afterwards nothing may be
held, and there must have been no wrong byte, no wait past its deadline, no violated invariant: exit code 0 only then.
Prints one JSON line; `--out` writes the same as a page of Markdown."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.temp_client import TempClient

EXPLAINED = """
A memory manager with three tiers (256 pages of 64 KiB in L1, 512 in L2, an SSD tier under a cap of 128 MiB) and
TempBuffers is kept full by four clients whose pages and buffers follow from their names, so that each reads and checks
what others wrote. Meanwhile clients and movers are killed by SIGKILL, the SSD mover is stopped for up to 8 s at a time,
and its files get flipped bits and are cut short, so that reads fail as on a bad disk. A fault is a wrong byte, a wait
longer than its deadline by 2 s, a violated invariant (all tables are checked after each act), an internal error, or
anything still pinned, leased, reserved or in a job after the last client is dead.
"""
PAGE = 64 << 10
WORKERS = 4


class Soak:
    """One run in a directory of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.worst_s = 0.0
        spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=256, l2_pages=512, l3_pages=4096)
        ssd = ("{python}", "-m", "omni_flow.data.ssd.mover", "{path}", str(folder / "ssd"), str(128 << 20))
        self.config = ServerConfig(
            path=str(folder / "run" / "memory.sock"),
            pools=(spec,),
            temp_bytes=32 << 20,
            orphan_s=2.0,
            movers=(("copy",), ssd),
        )
        (folder / "run").mkdir(mode=0o700)
        (folder / "ssd").mkdir()
        self.server = start(self.config, log=str(folder / "log"))
        self.workers: list[subprocess.Popen[str]] = []
        self.pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(WORKERS // 2)]
        self.viewer = MemoryManagerClient(self.config.path, role="viewer")
        for at in range(WORKERS):
            self.workers.append(self.worker(at))

    def worker(self, at: int) -> subprocess.Popen[str]:
        end = self.pairs[at // 2][at % 2]
        script = str(Path(__file__).with_name("soak_worker.py"))
        seed = str(self.random.randrange(1 << 30))
        command = [sys.executable, script, self.config.path, seed, str(end.fileno())]
        return subprocess.Popen(command, pass_fds=(end.fileno(),), stdout=subprocess.PIPE, text=True)

    def mover(self, name: str) -> int | None:
        """Pid of a mover, if it is there."""
        return next((row["pid"] for row in self.viewer.inspect() if row["name"] == name), None)

    def kill_worker(self) -> None:
        at = self.random.randrange(WORKERS)
        self.workers[at].kill()
        self.reap(at)

    def reap(self, at: int) -> None:
        """Start a worker that has ended again; note what it said."""
        output, _ = self.workers[at].communicate()
        if output.strip() or self.workers[at].returncode not in (-signal.SIGKILL, 3):
            self.faults.append(f"worker {at} ended with {self.workers[at].returncode}: {output.strip()}")
        self.workers[at] = self.worker(at)

    def kill_mover(self) -> None:
        pid = self.mover(self.random.choice(["copy mover", "ssd mover"]))
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def stall_disk(self) -> None:
        pid = self.mover("ssd mover")
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            self.look(self.random.uniform(0.5, 8.0))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def flip_bits(self) -> None:
        files = [path for path in (self.folder / "ssd").rglob("*") if path.is_file() and path.stat().st_size > PAGE]
        if not files:
            return
        path = self.random.choice(files)
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            for _ in range(200):
                at = self.random.randrange(path.stat().st_size)
                old = os.pread(file.fileno(), 1, at)
                if old:
                    os.pwrite(file.fileno(), bytes([old[0] ^ (1 << self.random.randrange(8))]), at)

    def cut_file(self) -> None:
        """Reads behind the cut end short: an I/O error."""
        files = list((self.folder / "ssd").rglob("*.seg"))
        if files:
            with contextlib.suppress(OSError):
                path = self.random.choice(files)
                os.truncate(path, path.stat().st_size // 2)

    def look(self, seconds: float) -> None:
        """Watch the manager answer for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            self.viewer.ping()
            self.worst_s = max(self.worst_s, time.monotonic() - began)
            self.viewer.wait_end(0.05)

    def run(self, minutes: float) -> None:
        acts = [self.kill_worker] * 4 + [self.kill_mover, self.stall_disk, self.flip_bits, self.cut_file]
        until = time.monotonic() + minutes * 60
        while time.monotonic() < until and not self.faults:
            self.look(self.random.uniform(0.2, 3.0))
            act = self.random.choice(acts)
            act()
            self.done[act.__name__] += 1
            for at, worker in enumerate(self.workers):
                if worker.poll() is not None:
                    self.reap(at)
            self.done["checks"] += 1
            self.faults += self.viewer.check()

    def end(self) -> dict[str, object]:
        """Kill the workers, then count what is left."""
        for worker in self.workers:
            worker.kill()
            worker.communicate()
        for pair in self.pairs:
            for end in pair:
                end.close()
        until = time.monotonic() + 60
        with MemoryManagerClient(self.config.path, name="end") as client:
            temp = TempClient(client)
            while True:
                temp.flush()
                stats = client.stats()
                left = {
                    "pinned": stats["pool_l1_pinned/kv"] + stats["pool_l2_pinned/kv"],
                    "leases": stats["pool_leases/kv"],
                    "reservations": stats["pool_reservations/kv"],
                    "jobs": stats["pool_jobs_running/kv"] + stats["pool_jobs_orphaned/kv"],
                    "temp_slots": stats["temp_slots"] + stats["temp_orphans"],
                }
                if not any(left.values()) or time.monotonic() > until:
                    break
                client.wait_end(0.1)
            self.faults += client.check()
        if any(left.values()):
            self.faults.append(f"left: {left}")
        if stats["internal_errors"]:
            self.faults.append(f"{stats['internal_errors']} internal errors")
        self.viewer.close()
        self.server.terminate()
        self.server.wait()
        names = ("stored", "evicted", "demoted", "migrated", "hits_l1", "hits_l2", "waits", "reclaimed")
        names += ("job_pages_failed", "bad_records")
        return {
            "faults": self.faults,
            "left": left,
            "done": dict(self.done),
            "worst_ping_ms": round(self.worst_s * 1000, 1),
            "requests": stats["requests"],
            **{name: stats[f"pool_{name}/kv"] for name in names},
            **{name: stats[name] for name in ("temp_leased", "temp_orphaned", "job_jobs", "job_movers_lost")},
            "l3_turned_off": stats["job_l3_off"],
        }


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = {key: value for key, value in result.items() if not isinstance(value, dict | list | str)}
    rows |= {f"acts: {name}": count for name, count in result["done"].items()}
    rows |= {f"left: {name}": count for name, count in result["left"].items()}
    table = "\n".join(f"| {key} | {value:,} |" for key, value in rows.items())
    faults = "\n".join(f"* {fault}" for fault in result["faults"])
    command = f"python bench/soak.py --minutes {result['minutes']:g} --seed {result['seed']}"
    head = f"`{command}` on {result['machine']}:\n**{len(result['faults'])} faults.**"
    whole = f"# Soak of the data plane\n\n{head}\n{EXPLAINED}\n| what | how many |\n|---|---|\n{table}\n\n{faults}"
    return whole.rstrip() + "\n"


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--dir", default="/var/tmp", help="parent of the directory that is used and deleted; a real disk"
    )
    parser.add_argument("--out", type=Path, help="file for a page of Markdown")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="omni-soak", dir=options.dir) as folder:
        soak = Soak(Path(folder), options.seed)
        try:
            soak.run(options.minutes)
        finally:
            result = {"minutes": options.minutes, "seed": options.seed, **soak.end()}
            result["ran_s"] = round(time.monotonic() - began, 1)
            if result["faults"]:
                sys.stderr.write((Path(folder) / "log").read_text()[-4000:])
    result["machine"] = f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps(result))
    if options.out is not None:
        options.out.write_text(page(result), encoding="utf-8")
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
