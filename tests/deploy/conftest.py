"""Deployments of real processes that must be gone, and empty, when a test ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omni_flow import Graph, RequestFailed, alaunch
from omni_flow.control.runtime.client import AsyncRequest
from omni_flow.deploy.local import AsyncDeployment

WAIT_S = 20.0


class Events:
    """The lines of `on_event`, to be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._changed.set()

    async def until(self, part: str) -> str:
        """The first line that contains `part`, as soon as there is one."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for line in self.lines:
                    if part in line:
                        return line
                self._changed.clear()
                await self._changed.wait()


def pid_of(app: AsyncDeployment, place: str) -> int:
    role = place.partition("/")[0]
    return next(r.pid for r in app.status()[role].replicas if r.place == place)


def pids(app: AsyncDeployment) -> list[int]:
    return [replica.pid for role in app.status().values() for replica in role.replicas if replica.pid]


async def emptied(app: AsyncDeployment, rounds: int = 200) -> dict[str, dict[str, int]]:
    """What replicas hold once closes under way have been taken; asked a bounded number of times."""
    census: dict[str, dict[str, int]] = {}
    for _ in range(rounds):
        async with asyncio.timeout(WAIT_S):
            census = await app.census()
        if not any(any(held.values()) for held in census.values()):
            return {}
        await asyncio.sleep(0)
    return census


async def outcome_of(request: AsyncRequest) -> dict[str, Any] | RequestFailed:
    try:
        async with asyncio.timeout(20):
            return await request.result()
    except RequestFailed as failed:
        return failed


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def ended(pid: int) -> None:
    """Wait until a process is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(pidfd, lambda: None if gone.done() else gone.set_result(None))
    try:
        async with asyncio.timeout(WAIT_S):
            await gone
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


@asynccontextmanager
async def deployed(graph: Graph, events: Events | None = None, **options: Any) -> AsyncIterator[AsyncDeployment]:
    """Runs `graph`; afterwards no replica may hold anything, and no process may live."""
    async with alaunch(graph, on_event=events or Events(), **options) as app:
        yield app
        assert await emptied(app) == {}
        seen = pids(app)
    assert [pid for pid in seen if pid != os.getpid() and alive(pid)] == []


BARE: dict[str, Any] = {"memory": None}
"""Options of deployments whose test has nothing to do with a memory manager: it would take most of their time."""


def bare(graph: Graph, events: Events | None = None, **options: Any) -> AbstractAsyncContextManager[AsyncDeployment]:
    """`deployed` without a memory manager."""
    return deployed(graph, events, **BARE, **options)


@pytest.fixture(autouse=True)
def run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run directories of a test lie in a place of its own, which must be empty afterwards."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "omni-flow"
