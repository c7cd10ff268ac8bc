"""What a node gives to others: pages pinned for a reader, and released at its word, its end, or the time it named."""

import asyncio
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import BadArgument, DataError, Refused, UnknownName
from omni_flow.data.messages import L2, JobAdd
from omni_flow.data.protocol import Op
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.arena_ids import arena_id, host_tiers
from omni_flow.data.transfer.base import Endpoint

MAX_HOLD_S: Final = 600.0
U8 = NDArray[np.uint8]


@dataclass(slots=True)
class _Lease:
    node: str
    epoch: int
    pool: str
    lease: int
    timer: asyncio.TimerHandle


class Serving:
    """Pins for readers on other nodes. Args: `pages`, (pool, tier) → array (slots, page bytes); `is_over`, whether a
    node has begun another life than the one of an epoch."""

    def __init__(
        self,
        manager: AsyncMemoryManagerClient,
        pages: Callable[[str, int], U8],
        endpoint: Callable[[], Endpoint],
        is_over: Callable[[str, int], bool],
    ) -> None:
        self._manager = manager
        self._pages = pages
        self._endpoint = endpoint
        self._is_over = is_over
        self._leases: dict[int, _Lease] = {}
        # Not from 1: what is meant for a lease of an earlier life shall not end one of this.
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "little") + 1)
        self._pools = {info.name: info for info in manager.session.welcome.pools}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._leases)

    async def pin(self, ask: w.Pin) -> w.Pinned:
        """Raises: UnknownName, BadArgument when the asker's pool is another than ours, Refused when the asker's life is
        over."""
        info = self._pools.get(ask.pool)
        if info is None:
            raise UnknownName(f"this node has no pool {ask.pool!r}", f"it has {', '.join(self._pools) or 'none'}")
        if info.page_bytes != ask.page_bytes:
            raise BadArgument(
                f"pages of pool {ask.pool} have {info.page_bytes} bytes here and {ask.page_bytes} there",
                "give the pools of both nodes one page size",
            )
        if ask.hold_ms <= 0:
            raise BadArgument(f"a pin for {ask.hold_ms} ms", "give a time above 0")
        keys = w.keys_of(ask.keys)
        host = sum(tier for tier, _ in host_tiers(info))
        hold_s = min(ask.hold_ms / 1000, MAX_HOLD_S)
        tiers = await self._manager.probe(ask.pool, keys)
        elsewhere = ((tiers & host) == 0) & (tiers != 0)
        if elsewhere.any() and info.l2_pages:
            body = JobAdd("fetch", ask.pool, int(hold_s * 500), "", L2)
            await self._manager.call(Op.JOB_ADD, body, (keys[elsewhere],), timeout=hold_s)
            tiers = await self._manager.probe(ask.pool, keys)
        there = np.flatnonzero(tiers & host)
        if not len(there):
            return w.Pinned(0, self._endpoint(), b"", b"", b"", b"")
        match = await self._manager.lookup(ask.pool, keys[there], pin=True, tiers=host)
        if not match.pages:
            return w.Pinned(0, self._endpoint(), b"", b"", b"", b"")
        if self._is_over(ask.node, ask.epoch):  # `ended` has been told, or this came late
            await self._manager.unpin(ask.pool, match.lease)
            raise Refused(f"node {ask.node} has begun another life", "give each node a name of its own")
        number = self._keep(ask, match.lease, hold_s)
        try:
            checksums = await asyncio.get_running_loop().run_in_executor(
                None, self._checksums, ask.pool, match.tiers, match.slots
            )
        except BaseException:
            await self.unpin(number)
            raise
        arenas = np.array([arena_id(list(self._pools).index(ask.pool), int(tier)) for tier in match.tiers], np.uint8)
        return w.Pinned(
            number,
            self._endpoint(),
            there[: match.pages].astype("<u4").tobytes(),
            arenas.tobytes(),
            match.slots.astype("<u4").tobytes(),
            checksums.tobytes(),
        )

    async def unpin(self, number: int) -> bool:
        """Whether the lease was held until now."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return False
        lease.timer.cancel()
        await self._manager.unpin(lease.pool, lease.lease)
        return True

    async def ended(self, node: str, epoch: int | None = None) -> None:
        """A node is dead, or in a life after `epoch`: its pins end."""
        for number, lease in list(self._leases.items()):
            if lease.node == node and lease.epoch != epoch:
                await self.unpin(number)

    def _keep(self, ask: w.Pin, lease: int, hold_s: float) -> int:
        number = next(self._numbers)
        timer = asyncio.get_running_loop().call_later(hold_s, self._late, number)
        self._leases[number] = _Lease(ask.node, ask.epoch, ask.pool, lease, timer)
        return number

    def _late(self, number: int) -> None:
        task = asyncio.create_task(self._unpin_quietly(number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unpin_quietly(self, number: int) -> None:
        """The manager that held the pin may be gone; the node process then ends by itself."""
        try:
            await self.unpin(number)
        except DataError:
            self._leases.pop(number, None)

    def _checksums(self, pool: str, tiers: U8, slots: NDArray[np.uint32]) -> NDArray[np.uint64]:
        pages = {tier: self._pages(pool, tier) for tier in set(tiers.tolist())}
        digest = xxhash.xxh3_64_intdigest
        return np.array(
            [digest(pages[tier][slot]) for tier, slot in zip(tiers.tolist(), slots.tolist(), strict=True)], "<u8"
        )
