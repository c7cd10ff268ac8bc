"""Pass/fail lines of the scripts here that check instead of measure, and what they ask of a device."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Checks:
    """Named checks, printed as they come; whoever ran them exits with `status`.

    Args:
        as_json: the lines go to stderr, so that stdout is left to one JSON object.
        out: file that holds the JSON object after each check; None: none.
        device: what it runs on, for that object.
    """

    def __init__(self, as_json: bool, out: str | None, device: str) -> None:
        self._device = device
        self._lines = sys.stderr if as_json else sys.stdout
        self._out = out
        self._began = time.perf_counter()
        self.results: dict[str, dict[str, Any]] = {}

    def check(self, name: str, ok: bool, **figures: Any) -> None:
        """One check, with the numbers it went by."""
        at = round(time.perf_counter() - self._began, 1)
        self.results[name] = {"ok": bool(ok), **figures, "at_s": at}
        shown = " ".join(f"{key}={value}" for key, value in figures.items())
        print(f"{'pass' if ok else 'FAIL'}  {name}  {shown}  [{at} s]", file=self._lines, flush=True)
        if self._out:
            Path(self._out).write_text(json.dumps(self.summary(), indent=1))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What is raised inside is a failed check of this name, and the steps that follow run."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(limit=-3, file=sys.stderr, chain=False)
            self.check(f"{name}: runs to its end", False, error=last_lines(error))

    def summary(self) -> dict[str, Any]:
        """Everything so far, as plain values."""
        failed = [name for name, result in self.results.items() if not result["ok"]]
        return {
            "device": self._device,
            "machine": platform.platform(),
            "python": platform.python_version(),
            "passed": len(self.results) - len(failed),
            "failed": failed,
            "checks": self.results,
        }

    @property
    def status(self) -> int:
        """Exit status: 0 when there were checks and all passed."""
        return int(not self.results or any(not result["ok"] for result in self.results.values()))


def last_lines(error: BaseException) -> str:
    """Type of an exception and the last three lines of its text, of those that name an error if any do: the output of
    a process that died ends with advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\wError: |Assertion ", line)]
    return " | ".join([type(error).__name__, *(named or lines)[-3:]])


def device_says(what: str) -> str:
    """One property of the first device, as `nvidia-smi` says it."""
    query = ["nvidia-smi", "--id=0", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def device_mib() -> float:
    """MiB in use on the first device, all processes."""
    return float(device_says("memory.used"))


def device_settles(at_most: float, seconds: float = 10.0) -> float:
    """MiB in use once it is `at_most` or less, or the time is over: a driver takes a moment after a process's end."""
    until = time.monotonic() + seconds
    while (used := device_mib()) > at_most and time.monotonic() < until:
        time.sleep(0.1)
    return used
