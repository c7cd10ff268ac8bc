"""Executing `pull` and `push` jobs: the target's manager has reserved, the source pins, the driver moves, and only what
arrived with the right checksum while it was pinned counts."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_flow.data.errors import BadMessage, DataError
from omni_flow.data.messages import Job
from omni_flow.data.protocol import Column
from omni_flow.data.transfer import base
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.arena_ids import arena_id
from omni_flow.data.transfer.errors import PeerRestarted
from omni_flow.data.transfer.link import Answer, Link

log = logging.getLogger("omni_flow.data.transfer")
U8 = NDArray[np.uint8]
_UNPIN_S = 5.0


class Transfers:
    """Driver jobs as awaitables of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[base.JobId, asyncio.Future[base.Outcome]] = {}
        self.driver: base.Driver
        self.bytes_moved = 0

    def done(self, outcome: base.Outcome) -> None:
        """For the driver, from any thread."""
        self._loop.call_soon_threadsafe(self._ended, outcome)

    def _ended(self, outcome: base.Outcome) -> None:
        self.bytes_moved += outcome.bytes_moved
        waiting = self._waiting.pop(outcome.id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)

    async def read(
        self, peer: base.Endpoint, local: base.ArenaId, remote: base.ArenaId, spans: base.Spans, timeout_s: float
    ) -> None:
        """Cancelled, it returns only when nothing can write the local arena any more. Raises: TransferError."""
        id = base.JobId(next(self._ids))
        waiting = self._waiting[id] = self._loop.create_future()
        data = np.ascontiguousarray(spans, np.uint64).tobytes()
        self.driver.start(base.Job(id, "read", peer, local, remote, data, timeout_s))
        try:
            outcome = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.driver.cancel(id)
            while not waiting.done():
                with contextlib.suppress(asyncio.CancelledError):  # who cancels again waits, too
                    await asyncio.shield(waiting)
            raise
        outcome.check()


class Pulling:
    """Args: `link`, node name and seconds → link (raises when the node is unknown); `pages`, (pool, tier) → array;
    `pools`, pool names in the order of the configuration."""

    def __init__(
        self,
        node: str,
        epoch: int,
        transfers: Transfers,
        link: Callable[[str, float], Awaitable[Link]],
        pages: Callable[[str, int], U8],
        pools: list[str],
    ) -> None:
        self.counters = dict.fromkeys(("pulls", "pushes", "failed", "pages", "checksum_failures"), 0)
        self._node, self._epoch = node, epoch
        self._transfers, self._link, self._pages, self._pools = transfers, link, pages, pools

    async def run(self, job: Job, columns: list[Column]) -> tuple[U8, str]:
        """Per key 1 where it worked, and what went wrong if anything did."""
        ok = np.zeros(len(columns[4]), np.uint8)
        self.counters["pushes" if job.kind == "push" else "pulls"] += 1
        try:
            if job.kind == "push":
                await self._push(job, columns, ok)
            else:
                await self._pull(job, columns, ok)
        except DataError as error:
            ok[:] = 0
            self.counters["failed"] += 1
            return ok, f"{error.code}: {error}"
        self.counters["pages"] += int(ok.sum())
        return ok, ""

    async def _push(self, job: Job, columns: list[Column], ok: U8) -> None:
        def ask(left_ms: int) -> w.Said:
            return w.Take(self._node, job.pool, columns[4].tobytes(), left_ms)

        _, taken = await self._ask(job.peer, ask, w.Taken, time.monotonic() + job.deadline_ms / 1000)
        if len(taken.ok) != len(ok):
            raise BadMessage(f"node {job.peer} answered for {len(taken.ok)} of {len(ok)} keys")
        ok[:] = w.column(taken.ok, "u1")

    async def _pull(self, job: Job, columns: list[Column], ok: U8) -> None:
        def ask(left_ms: int) -> w.Said:
            return w.Pin(self._node, self._epoch, job.pool, job.page_bytes, columns[4].tobytes(), left_ms + 1000)

        end = time.monotonic() + job.deadline_ms / 1000
        link, pinned = await self._ask(job.peer, ask, w.Pinned, end)
        if not pinned.lease:
            return
        unpin = w.Unpin(pinned.lease)
        try:
            async with link.while_there():
                right = await self._fetch(job, columns, pinned, end)
            held = (await link.ask(unpin, w.Unpinned, _UNPIN_S)).held
        except BaseException:
            await link.tell(unpin)
            raise
        if held:
            ok[right] = 1

    async def _ask(
        self, node: str, request: Callable[[int], w.Said], kind: type[Answer], end: float
    ) -> tuple[Link, Answer]:
        """Ask a node, given the milliseconds that are left; once more if it begins a new life before it answers."""
        while True:
            link = await self._link(node, end - time.monotonic())
            met = link.met
            left = max(end - time.monotonic(), 0.001)
            try:
                return link, await link.ask(request(max(int(left * 1000), 1)), kind, left)
            except PeerRestarted as error:
                if link.met == met:  # it says so itself, of another
                    raise
                log.info("asked again in its new life", extra={"node": node, "error": str(error)})

    async def _fetch(self, job: Job, columns: list[Column], pinned: w.Pinned, end: float) -> NDArray[np.uint32]:
        """Positions whose pages are here with the checksum they had there."""
        positions = w.column(pinned.positions, "<u4")
        remote = w.column(pinned.slots, "<u4").astype(np.uint64) * job.page_bytes
        arenas = w.column(pinned.arenas, "u1")
        counts = {len(positions), len(arenas), len(remote), len(pinned.checksums) // 8}
        if len(counts) != 1 or (positions >= len(columns[2])).any() or len(np.unique(positions)) != len(positions):
            raise BadMessage(f"node {job.peer} pinned pages that were not asked for")
        slots = columns[2][positions]
        local = slots.astype(np.uint64) * job.page_bytes
        spans = np.stack([local, remote, np.full(len(local), job.page_bytes, np.uint64)], axis=1)
        target = arena_id(self._pools.index(job.pool), job.dst)
        for arena in np.unique(arenas).tolist():
            rows = spans[arenas == arena]
            left = end - time.monotonic()
            await self._transfers.read(pinned.endpoint, target, base.ArenaId(arena), rows, max(left, 0.001))
        checksums = w.column(pinned.checksums, "<u8")
        loop = asyncio.get_running_loop()
        right = await loop.run_in_executor(None, self._right, job, positions, slots, checksums)
        self.counters["checksum_failures"] += len(positions) - len(right)
        return right

    def _right(
        self, job: Job, positions: NDArray[np.uint32], slots: Column, checksums: NDArray[np.uint64]
    ) -> NDArray[np.uint32]:
        pages = self._pages(job.pool, job.dst)
        digest = xxhash.xxh3_64_intdigest
        same = [digest(pages[slot]) == want for slot, want in zip(slots.tolist(), checksums.tolist(), strict=True)]
        return positions[np.array(same, np.bool_)]
