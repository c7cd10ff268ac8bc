"""The transfer process of a node: `python -m omni_flow.data.transfer.node CONFIG [--ready-fd N]`, CONFIG in JSON.

It is a mover of the memory manager (kinds `pull` and `push`), talks to the same process of every other node over ZMQ,
keeps the directory, and runs the transfer driver. Third-party transports crash here and not in the manager: the manager
takes back what the jobs held, and whoever started this process starts it again. It ends when its manager does.
"""

import argparse
import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import DataError, StaleEpoch, run_process
from omni_flow.data.logs import log_to_stderr
from omni_flow.data.messages import L1, L2, TIER_NAMES, Job, JobAdd, JobCancel, JobDone
from omni_flow.data.protocol import Column, Message, Op
from omni_flow.data.transfer import messages as m
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.arena_ids import arena_id, host_tiers
from omni_flow.data.transfer.cluster import Cluster
from omni_flow.data.transfer.node_config import NodeConfig
from omni_flow.data.transfer.pulling import Pulling, Transfers
from omni_flow.data.transfer.registry import make_driver
from omni_flow.data.transfer.serving import Serving

log = logging.getLogger("omni_flow.data.transfer")
_NOTHING = np.empty(0, np.uint64)


class ManagerEnded(Exception):
    """The memory manager has gone, so this process ends."""


class Node:
    """Make it with `await Node.start(config)`, then `await node.run()`."""

    def __init__(self, config: NodeConfig, manager: AsyncMemoryManagerClient) -> None:
        self.config = config
        self._manager = manager
        self._pools = {info.name: info for info in manager.session.welcome.pools}
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._asks: asyncio.Queue[Message] = asyncio.Queue()
        self._early: list[Message] = []
        self._group: asyncio.TaskGroup | None = None
        self._transfers = Transfers()
        driver = make_driver(config.driver, config.driver_options(), self._transfers.done)
        self._transfers.driver = driver
        self._serving = Serving(manager, self._pages, driver.endpoint, self._is_over)
        self.cluster = Cluster(config, tuple(self._pools), self._serving.ended, self._heard)
        self._pulling = Pulling(
            config.name, self.cluster.epoch, self._transfers, self.cluster.link, self._pages, list(self._pools)
        )

    @classmethod
    async def start(cls, config: NodeConfig) -> "Node":
        """Connect to the manager, open its arenas to the driver, read what it holds.

        Raises: Disconnected, DriverAbsent, BadJob, Refused.
        """
        manager = await AsyncMemoryManagerClient.connect(
            config.manager, name=f"node {config.name}", role="mover", kinds=("pull", "push")
        )
        node = cls(config, manager)
        for number, info in enumerate(node._pools.values()):
            for tier, pages in host_tiers(info):
                node._open_arena(number, info.name, tier, pages * info.page_bytes)
        manager.on_event = node._event
        await manager.call(m.DIR_WATCH)
        for name in node._pools:
            await node._read_rows(name)
        return node

    async def run(self) -> None:
        """Until the manager ends. Raises: what must not happen, which ends the process."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for message in self._early:
                    self._event(message)
                group.create_task(self._answer_asks())
                group.create_task(self.cluster.run())
                await self._wait_for_the_end()
                raise ManagerEnded
        except* ManagerEnded:
            log.info("memory manager ended, so does its transfer process", extra={"node": self.config.name})
        finally:
            self.cluster.close()
            self._transfers.driver.close()

    async def _wait_for_the_end(self) -> None:
        """Tell the counters at each beat: the manager answers at once or has gone."""
        with contextlib.suppress(DataError):
            while True:
                numbers = {
                    **self._pulling.counters,
                    "bytes": self._transfers.bytes_moved,
                    "nodes": len(self.cluster.directory.nodes()),
                    "leases": len(self._serving),
                }
                await self._manager.call(m.DIR_REPORT, m.DirReport(numbers))
                await asyncio.sleep(self.config.beat_s)

    # -- this node's manager --------------------------------------------------------------------------------------

    def _open_arena(self, number: int, pool: str, tier: int, size: int) -> None:
        """Give the driver an arena; peers may read it."""
        _, fd = self._manager.session.descriptor(f"{pool}/{TIER_NAMES[tier]}", write=True)
        try:
            self._transfers.driver.register_arena(arena_id(number, tier), fd, size, "read")
        finally:
            os.close(fd)

    def _pages(self, pool: str, tier: int) -> NDArray[np.uint8]:
        info = self._pools[pool]
        arena = self._manager.arena(f"{pool}/{TIER_NAMES[tier]}", write=True)
        return arena.pages(info.page_bytes, info.l1_pages if tier == L1 else info.l2_pages)

    async def _read_rows(self, pool: str) -> None:
        start = 0
        while start >= 0:
            reply = await self._manager.call(m.DIR_ROWS, m.DirRowsAsk(pool, start))
            self.cluster.own[pool].apply(reply.column(0, "<u8"), _NOTHING)
            start = reply.body(m.DirRows).next

    def _event(self, message: Message) -> None:
        if message.op == m.DIR_CHANGED:
            pool = message.body(m.DirPool).pool
            self.cluster.changed(pool, message.column(0, "<u8").copy(), message.column(1, "|u1") != 0)
        elif self._group is None:
            self._early.append(message.own())
        elif message.op == Op.JOB:
            message = message.own()
            job = message.body(Job)
            self._jobs[job.id] = self._group.create_task(self._run_job(job, list(message.columns)))
        elif message.op == Op.JOB_CANCEL:
            running = self._jobs.get(message.body(JobCancel).id)
            if running is not None:
                running.cancel()
        elif message.op == m.DIR_ASK:
            self._asks.put_nowait(message.own())

    async def _run_job(self, job: Job, columns: list[Column]) -> None:
        ok, error = np.zeros(len(columns[4]), np.uint8), "cancelled"
        try:
            with contextlib.suppress(asyncio.CancelledError):
                ok, error = await self._pulling.run(job, columns)
        finally:
            del self._jobs[job.id]
        try:
            await self._manager.call(Op.JOB_DONE, JobDone(job.id, error), (ok,))
        except StaleEpoch:
            # The manager this job came from is gone; `run` ends this process.
            return
        except DataError as refusal:
            log.warning("report refused", extra={"job": job.id, "error": str(refusal)})

    async def _answer_asks(self) -> None:
        while True:
            message = await self._asks.get()
            ask = message.body(m.DirAsk)
            masks = self.cluster.directory.locate(ask.pool, message.column(0, "key"))
            bits = [np.packbits(mask) for mask in masks.values()]
            packed = np.concatenate(bits) if bits else np.empty(0, np.uint8)
            answer = m.DirAnswer(ask.id, self.cluster.directory.nodes(), tuple(masks))
            with contextlib.suppress(DataError):  # who asked has gone
                await self._manager.call(m.DIR_ANSWER, answer, (packed,))

    # -- other nodes ----------------------------------------------------------------------------------------------

    def _is_over(self, node: str, epoch: int) -> bool:
        return self.cluster.directory.is_over(node, epoch)

    async def _heard(self, said: w.Said) -> w.Said | None:
        """A request of another node that is not the cluster's business."""
        match said:
            case w.Pin():
                return await self._serving.pin(said)
            case w.Unpin(lease):
                return w.Unpinned(await self._serving.unpin(lease))
            case w.Take(node, pool, keys, timeout_ms):
                return await self._take(node, pool, w.keys_of(keys), timeout_ms)
            case _:
                return w.Sorry("bad-message", f"a node does not say {type(said).__name__} unasked", "")

    async def _take(self, node: str, pool: str, keys: NDArray[np.uint8], timeout_ms: int) -> w.Taken:
        """A push: what is missing here is pulled, as this node's manager plans it."""
        await self.cluster.link(node, timeout_ms / 1000)
        here = await self._manager.probe(pool, keys) != 0
        missing = np.flatnonzero(~here)
        if len(missing):
            body = JobAdd("pull", pool, timeout_ms, node, L2)
            reply = await self._manager.call(Op.JOB_ADD, body, (keys[missing],), timeout=timeout_ms / 1000 + 5)
            here[missing] = reply.column(0, "|u1", len(missing)) != 0
        return w.Taken(here.astype(np.uint8).tobytes())


async def serve(config: NodeConfig, ready_fd: int) -> None:
    """Run a node until its manager ends; writes its name and address to `ready_fd`, if there is one, as JSON."""
    node = await Node.start(config)
    if ready_fd >= 0:
        os.write(ready_fd, msgspec.json.encode({"node": config.name, "address": node.cluster.address}) + b"\n")
        os.close(ready_fd)
    await node.run()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="omni-flow-transfer")
    parser.add_argument("config", help="NodeConfig as JSON, its key perhaps in a file of its own (key_file)")
    parser.add_argument("--ready-fd", type=int, default=-1)
    options = parser.parse_args(argv)
    log_to_stderr()
    config = msgspec.json.decode(options.config, type=NodeConfig)
    asyncio.run(serve(config.with_key(), options.ready_fd))


if __name__ == "__main__":
    run_process(main)
