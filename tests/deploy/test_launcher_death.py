"""Whatever kills the launching process, nothing of its deployment survives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omni_flow import launch

from .conftest import ended, parent_of
from .roles import Echo, one

SCRIPT = """
import select, sys
sys.path.insert(0, sys.argv[1])
from deploy.roles import diamond, Hangs, NeverLoads, one
from omni_flow import launch
graph = {"hang": one(Hangs, "on_loop"), "loading": one(NeverLoads)}.get(sys.argv[2], diamond())
target = sys.argv[1] + "/deploy/target.py:graph" if sys.argv[2] == "spawn" else None
with launch(graph, target=target) as app:
    if sys.argv[2] == "hang":
        app.submit(x="hang")
    print(*(replica.pid for role in app.status().values() for replica in role.replicas), flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass  # Python hears of a signal that came just before a call when that returns, which a read never might
"""


def launched(how: str) -> tuple[subprocess.Popen[str], list[int], int]:
    """A process that launches a graph and waits; the pids of its workers and of its nursery."""
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent.parent), how]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    workers = [int(pid) for pid in launcher.stdout.readline().split()]
    assert workers
    return launcher, workers, parent_of(workers[0])


def wait_for(pids: list[int]) -> None:
    async def body() -> None:
        for pid in pids:
            await ended(pid)

    asyncio.run(body())


def finish(launcher: subprocess.Popen[str]) -> int:
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    status = launcher.wait(20)
    launcher.stdin.close()
    launcher.stdout.close()
    return status


@pytest.mark.parametrize("how", ["fork", "spawn", "hang"])
def test_a_killed_launcher_takes_every_process_and_socket_with_it(how: str, run_directories: Path) -> None:
    launcher, workers, nursery = launched(how)
    launcher.kill()
    wait_for([*workers, nursery])
    assert finish(launcher) == -signal.SIGKILL
    assert list(run_directories.iterdir()) == []


def test_a_launcher_that_is_told_to_end_takes_every_process_with_it(run_directories: Path) -> None:
    launcher, workers, nursery = launched("fork")
    launcher.terminate()
    wait_for([*workers, nursery])
    assert finish(launcher) == -signal.SIGTERM
    assert list(run_directories.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_while_roles_load_leaves_nothing(signum: signal.Signals, run_directories: Path) -> None:
    launcher, workers, nursery = launched("loading")
    launcher.send_signal(signum)
    wait_for([*workers, nursery])
    assert finish(launcher) == -signum
    assert list(run_directories.iterdir()) == []


def test_an_interrupt_at_the_launcher_closes_the_deployment(run_directories: Path) -> None:
    launcher, workers, nursery = launched("fork")
    launcher.send_signal(signal.SIGINT)
    wait_for([*workers, nursery])
    assert finish(launcher) == -signal.SIGINT
    assert list(run_directories.iterdir()) == []


def test_what_launcher_and_nursery_leave_when_both_are_killed_is_cleared_by_the_next_start(
    run_directories: Path,
) -> None:
    launcher, workers, nursery = launched("fork")
    os.kill(nursery, signal.SIGSTOP)
    launcher.kill()
    finish(launcher)
    os.kill(nursery, signal.SIGKILL)
    wait_for([*workers, nursery])
    left = list(run_directories.iterdir())
    assert len(left) == 1
    with launch(one(Echo)) as app:
        assert app.submit(x="a").result(timeout=10) == {"y": "a"}
        assert not left[0].exists()
    assert list(run_directories.iterdir()) == []
