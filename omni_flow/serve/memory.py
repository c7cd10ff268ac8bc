"""The memory manager of a deployment, as the page and the metrics see it: its tiers and its counters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import DataError
from omni_flow.data.messages import SessionPages
from omni_flow.data.session_leases import lease_name
from omni_flow.deploy.local import AsyncDeployment

log = logging.getLogger("omni_flow.serve")

ASK_S = 1.0
Stats = dict[str, int | float]


class MemoryLook:
    """Asks the managers of one deployment. `last` is what they said last, summed; None: there is none, or one does not
    answer."""

    def __init__(self, deployment: AsyncDeployment) -> None:
        self._deployment = deployment
        self._clients: dict[str, AsyncMemoryManagerClient] = {}
        self._connecting = asyncio.Lock()
        self.last: Stats | None = None

    @property
    def present(self) -> bool:
        """Whether the deployment has a manager at all."""
        return bool(self._addresses)

    @property
    def _addresses(self) -> list[str]:
        return [memory.address for memory in getattr(self._deployment.launcher, "memories", ())]

    async def look(self) -> Stats | None:
        """Its numbers now."""
        if not self.present:
            return None
        try:
            async with asyncio.timeout(ASK_S):
                self.last = _summed([await client.stats() for client in await self._connected()])
        except (DataError, OSError, TimeoutError) as error:
            log.warning("the memory manager does not answer: %s", error)
            self.last = None
            await self.close()
        return self.last

    async def session(self, name: str) -> tuple[SessionPages, ...]:
        """What a session (`lease_name`) has there. Raises DataError, OSError, TimeoutError: no answer."""
        async with asyncio.timeout(ASK_S):
            return tuple([page for c in await self._connected() for page in await c.session_tiers(name)])

    async def _connected(self) -> list[AsyncMemoryManagerClient]:
        async with self._connecting:
            found = []
            for address in self._addresses:
                client = self._clients.get(address)
                if client is None:
                    client = await AsyncMemoryManagerClient.connect(address, name="serve", role="viewer")
                    self._clients[address] = client
                found.append(client)
            return found

    async def close(self) -> None:
        """End the connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()


def _summed(each: Sequence[Stats]) -> Stats:
    total = dict(each[0])
    for stats in each[1:]:
        for name, number in stats.items():
            total[name] = total.get(name, 0) + number
    return total


def tiers(stats: Stats) -> dict[str, Any]:
    """What is used of each tier, and how often a look-up found pages there."""
    found: list[dict[str, Any]] = []
    hits: dict[str, dict[str, float]] = {}
    for full, slots in stats.items():
        name, _, pool = full.partition("/")
        if name in ("pool_l1_slots", "pool_l2_slots") and slots:
            tier = name[5:7]
            used = slots - stats.get(f"pool_{tier}_free/{pool}", 0)
            pinned = stats.get(f"pool_{tier}_pinned/{pool}", 0)
            about = {"name": f"{pool} {tier.upper()}", "used": used, "total": slots, "unit": "pages", "pinned": pinned}
            found.append(about)
        elif name == "pool_l3_pages" and stats.get(f"pool_l3_on/{pool}"):
            found.append({"name": f"{pool} L3", "used": slots, "total": 0, "unit": "pages", "pinned": 0})
        elif name.startswith("pool_hits_") or name == "pool_misses":
            hits.setdefault(pool, {})[name.removeprefix("pool_").removeprefix("hits_")] = slots
    total = stats.get("temp_bytes", 0)
    if total:
        used = total - stats.get("temp_free_bytes", 0)
        found.append({"name": "temporary tensors", "used": used, "total": total, "unit": "bytes", "pinned": 0})
    if stats.get("weight_bytes"):
        weights = stats["weight_bytes"]
        found.append({"name": "weights", "used": weights, "total": 0, "unit": "bytes", "pinned": 0})
    return {"tiers": found, "hits": hits}


async def session_kv(looks: Iterable[MemoryLook], session: str, tenant: str) -> dict[str, dict[str, int]] | None:
    """Tokens and bytes of KV that a session has in each tier; None: there is no memory manager, or one is silent.

    A page that has copies in two tiers counts in both. `kept` is what does not go before other pages do.
    """
    total = {tier: {"tokens": 0, "bytes": 0} for tier in ("kept", "l1", "l2", "l3")}
    present = [look for look in looks if look.present]
    try:
        found = [pages for look in present for pages in await look.session(lease_name(session, tenant))]
    except (DataError, OSError, TimeoutError) as error:
        log.warning("the memory manager does not say what a session has: %s", error)
        return None
    for pages in found:
        for tier, about in total.items():
            count: int = getattr(pages, tier)
            about["tokens"] += count * pages.tokens
            about["bytes"] += count * pages.page_bytes
    return total if present else None
