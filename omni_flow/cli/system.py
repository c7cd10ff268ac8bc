"""Facts of this machine that decide what can run here. Read-only; each with what to do when it is too little."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omni_flow.data.ledger import ORDERED

Level = Literal["ok", "low", "missing"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of `omni-flow doctor`. `mend` is empty when all is well."""

    name: str
    value: str
    level: Level = "ok"
    mend: str = ""


def facts() -> list[Fact]:
    """All facts, most important first."""
    return [_python(), _system(), _processor(), _cores(), _memory(), _shared(), _files(), _locked(), _packet(), _gpu()]


def _python() -> Fact:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    mend = "" if fits else "use Python 3.11, 3.12 or 3.13"
    return Fact("Python", f"{platform.python_version()} ({sys.executable})", "ok" if fits else "missing", mend)


def _system() -> Fact:
    linux = sys.platform == "linux"
    mend = "" if linux else "Omni-Flow needs Linux: Unix SEQPACKET sockets and memfd"
    return Fact("system", f"{platform.system()} {platform.release()}", "ok" if linux else "missing", mend)


def _processor() -> Fact:
    mend = "" if ORDERED else "TempBuffers need the order of stores of x86-64: arrays travel in messages here"
    return Fact("processor", platform.machine(), "ok" if ORDERED else "low", mend)


def _cores() -> Fact:
    usable = len(os.sched_getaffinity(0))
    return Fact("cores", f"{usable} usable of {os.cpu_count()}")


def _memory() -> Fact:
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(rows[key].split()[0]) * 1024 / GIB for key in ("MemTotal", "MemAvailable"))
    low = free < 3
    mend = "the demo needs about 3 GiB: end other programs" if low else ""
    return Fact("memory", f"{free:.1f} GiB available of {total:.1f} GiB", "low" if low else "ok", mend)


def _shared() -> Fact:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Fact("/dev/shm", "none")
    usage = shutil.disk_usage(path)
    low = usage.total < GIB / 2
    mend = "libraries that share memory by name (PyTorch) want more: docker run --shm-size 1g" if low else ""
    return Fact(
        "/dev/shm", f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB", "low" if low else "ok", mend
    )


def _files() -> Fact:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft < 1024
    mend = "ulimit -n 65536" if low else ""
    return Fact("open files", f"{_limit(soft)} (hard limit {_limit(hard)})", "low" if low else "ok", mend)


def _locked() -> Fact:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _limit(soft) if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
    return Fact("locked memory", text)


def _packet() -> Fact:
    size = int(Path("/proc/sys/net/core/wmem_max").read_text())
    return Fact("largest socket buffer", f"{size // 1024} KiB; longer messages are cut and joined")


def gpus() -> list[str]:
    """Device files of NVIDIA GPUs."""
    return sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))


def _gpu() -> Fact:
    cards = gpus()
    return Fact("GPU", ", ".join(cards) if cards else "none; everything runs on the CPU")


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)
