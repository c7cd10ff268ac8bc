"""The memory manager of a deployment, as the page and the metrics see it: its tiers and its counters."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import DataError
from omni_flow.deploy.local import AsyncDeployment

log = logging.getLogger("omni_flow.serve")

ASK_S = 1.0
Stats = dict[str, int | float]


class MemoryLook:
    """Asks the manager of one deployment. `last` is what it said last; None: there is none, or it does not answer."""

    def __init__(self, deployment: AsyncDeployment) -> None:
        self._deployment = deployment
        self._client: AsyncMemoryManagerClient | None = None
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
                if self._client is None:
                    address = getattr(self._deployment.launcher, "memory").address  # noqa: B009
                    self._client = await AsyncMemoryManagerClient.connect(address, name="serve", role="viewer")
                self.last = await self._client.stats()
        except (DataError, OSError, TimeoutError) as error:
            log.warning("the memory manager does not answer: %s", error)
            self.last = None
            await self.close()
        return self.last

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
