"""The memory manager of a deployment, as the page and the metrics see it: its tiers and its counters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
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
    """Asks the manager of one deployment. `last` is what it said last; None: there is none, or it does not answer."""

    def __init__(self, deployment: AsyncDeployment) -> None:
        self._deployment = deployment
        self._client: AsyncMemoryManagerClient | None = None
        self._connecting = asyncio.Lock()
        self.last: Stats | None = None

    @property
    def present(self) -> bool:
        """Whether the deployment has a manager at all."""
        return getattr(self._deployment.launcher, "memory", None) is not None

    async def look(self) -> Stats | None:
        """Its numbers now."""
        if not self.present:
            return None
        try:
            async with asyncio.timeout(ASK_S):
                self.last = await (await self._connected()).stats()
        except (DataError, OSError, TimeoutError) as error:
            log.warning("the memory manager does not answer: %s", error)
            self.last = None
            await self.close()
        return self.last

    async def session(self, name: str) -> tuple[SessionPages, ...]:
        """What a session (`lease_name`) has there. Raises DataError, OSError, TimeoutError: no answer."""
        async with asyncio.timeout(ASK_S):
            return await (await self._connected()).session_tiers(name)

    async def _connected(self) -> AsyncMemoryManagerClient:
        async with self._connecting:
            if self._client is None:
                address = getattr(self._deployment.launcher, "memory").address  # noqa: B009
                self._client = await AsyncMemoryManagerClient.connect(address, name="serve", role="viewer")
            return self._client

    async def close(self) -> None:
        """End the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


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
