from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from voice_vision_chat import weights

MAKER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from voice_vision_chat.weights import made_once

def make(folder):
    assert not any(folder.iterdir())
    (folder / "model").write_text(str(os.getpid()))
    if sys.argv[3] == "hang":
        print("started", flush=True)
        sys.stdin.read()
    with open(Path(sys.argv[2]).with_name("log"), "a") as log:
        log.write("made\\n")

made_once(Path(sys.argv[2]), make)
"""


def start(target: Path, how: str = "finish") -> subprocess.Popen[str]:
    examples = str(Path(weights.__file__).parents[1])
    command = [sys.executable, "-c", MAKER, examples, str(target), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def started(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"


def test_of_several_processes_one_makes_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "weights"
    processes = [start(target) for _ in range(4)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4
    assert (tmp_path / "cache" / "log").read_text() == "made\n"
    assert [path.name for path in target.iterdir()] == ["model"]


def test_when_the_maker_is_killed_the_one_that_waits_takes_over(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    first = start(target, "hang")
    started(first)
    second = start(target)
    assert not target.exists()
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert (target / "model").read_text() == str(second.pid)
    assert not target.with_name("weights.unfinished").exists()


def test_a_failed_conversion_leaves_no_folder_and_its_error_goes_through(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        weights.made_once(tmp_path / "weights", fail)
    assert not (tmp_path / "weights").exists()
    weights.made_once(tmp_path / "weights", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["whole"]


def test_the_cache_lies_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/big")
    assert weights.cache_dir() == Path("/var/big/omni-flow")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert weights.cache_dir() == Path("/home/ada/.cache/omni-flow")


def test_a_missing_package_is_named_with_the_mend() -> None:
    with pytest.raises(
        weights.WeightsMissing, match=r"not-there does not provide model\.bin: install the demo's packages"
    ):
        weights._in_package("not-there", "not_there_at_all", "model.bin")
