"""The memory manager of a local deployment: started with it, restarted if it dies, gone when the launcher is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from omni_flow.data import launch
from omni_flow.data.errors import DataError
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.ssd.directory import holder_of, make_usable
from omni_flow.data.tiers import movers_of, ssd_mover, with_l3

log = logging.getLogger("omni_flow.deploy")

RESTART_S = (0.5, 1.0, 2.0, 5.0)
"""Pauses before a memory manager that died is started anew; where that fails, the next, and the last again and again:
what it needs may still be held for a while by those who mapped the memory of the one before."""

CLOSE_GRACE_S = 3.0
"""How long a memory manager that was told to end may take before it is killed."""


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What memory a deployment on one machine shares.

    `temp_bytes`: arena for tensors between roles; `temp_client_bytes`: most of it that one process may hold, 0 for no
    bound. `pools`: KV page pools. `populate`: `now`, `background` or `lazy`. `managers`: how many memory managers keep
    KV pools, as if on so many machines: replica k of a role has its pages at manager k modulo their number, and finds
    none of the others'. Tensors between roles all lie at the first. `ssd`, `ssd_bytes`: directory of the SSD tier (L3)
    of pools with an L2, and most bytes of this deployment there, split evenly among managers. Each has a directory of
    its own, `SSD/GRAPH.NUMBER`; a later deployment of a graph of that name finds what lies there.

    Raises:
        ValueError: no manager, or one half of an SSD tier.
    """

    temp_bytes: int = 512 << 20
    temp_client_bytes: int = 0
    pools: tuple[PoolSpec, ...] = ()
    populate: str = "background"
    managers: int = 1
    ssd: str = ""
    ssd_bytes: int = 0

    def __post_init__(self) -> None:
        if self.managers < 1:
            raise ValueError(f"{self.managers} memory managers: there must be one")
        if bool(self.ssd) != (self.ssd_bytes > 0):
            raise ValueError(
                f"an SSD tier is a directory and a size, not ssd={self.ssd!r} and ssd_bytes={self.ssd_bytes}"
            )

    def disk(self, graph: str, number: int) -> Path | None:
        """The directory of the SSD tier of manager `number` of a deployment of `graph`."""
        return Path(self.ssd).absolute() / f"{quote(graph, safe='')}.{number}" if self.ssd else None

    def config(self, path: str, graph: str, number: int) -> ServerConfig:
        """What manager `number` of a deployment of `graph` serves at `path`; its directory for an SSD tier is made.

        Raises:
            BadSsdConfig: the directory can't be used, its bytes are too few, or no pool has an L2.
        """
        pools, movers = self.pools, movers_of(self.pools)
        directory = self.disk(graph, number)
        if directory is not None:
            share = self.ssd_bytes // self.managers
            pools = with_l3(pools, str(directory), share)
            make_usable(directory)
            movers += (ssd_mover(str(directory), share),)
        return ServerConfig(
            path=path,
            temp_bytes=0 if number else self.temp_bytes,
            temp_client_bytes=self.temp_client_bytes,
            pools=pools,
            populate=self.populate,
            movers=movers,
        )


class MemoryProcess:
    """Runs and watches a memory manager; its movers are its children. `disk`: where its SSD tier lies."""

    def __init__(self, config: ServerConfig, notify: Callable[[str], None], disk: Path | None = None) -> None:
        self.address = config.path
        self._config = config
        self._disk = disk
        self._notify = notify
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[subprocess.Popen[bytes]] | None = None
        self._life: tuple[int, int] | None = None

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start it and wait until clients may connect. Raises DataError."""
        for pool in self._disk.iterdir() if self._disk is not None else ():
            if holder := holder_of(pool):
                self._notify(f"{pool} is in use ({holder}): there is no SSD tier (L3) until it is free")
        self._life = os.pipe2(os.O_CLOEXEC)
        await self._start()
        self._watch = asyncio.create_task(self._restart_when_dead())

    async def _start(self) -> None:
        """Raises DataError, OSError. A start that nobody waits for any more is `close`'s."""
        assert self._life is not None
        self._starting = asyncio.ensure_future(asyncio.to_thread(launch.start, self._config, life=self._life[0]))
        self._process = await asyncio.shield(self._starting)

    async def _restart_when_dead(self) -> None:
        while True:
            assert self._process is not None
            await _ended(self._process.pid)
            status, self._process = self._process.wait(), None
            self._notify(f"the memory manager ended with {status} and is started anew; roles send arrays in messages")
            for pause in itertools.chain(RESTART_S, itertools.repeat(RESTART_S[-1])):
                await asyncio.sleep(pause)
                try:
                    await self._start()
                    self._notify(f"the memory manager is up again as {self.pid}")
                    break
                except (DataError, OSError) as error:
                    self._notify(f"the memory manager could not be started anew, it is tried again: {error}")

    async def close(self) -> None:
        """End it and wait for that: SIGTERM now, SIGKILL after `CLOSE_GRACE_S`."""
        if self._watch is not None:
            self._watch.cancel()
        if self._life is None:
            return
        os.close(self._life[1])  # one that is being started ends by itself
        if self._starting is not None:
            with contextlib.suppress(DataError, OSError):
                self._process = await self._starting
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await _ended(self._process.pid)
            except TimeoutError:
                log.error("the memory manager did not end within %g s and is killed", CLOSE_GRACE_S)
                self._process.kill()
            self._process.wait()
        os.close(self._life[0])
        self._life = None


async def _ended(pid: int) -> None:
    """Wait for the end of a child. By its pidfd: a thread that waits would be one less for everybody else's work."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    fd = os.pidfd_open(pid)
    loop.add_reader(fd, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)
