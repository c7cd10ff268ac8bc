"""Which arenas of KV pools take part in transfers, and their numbers: the same rule on every node, so they need not be
told."""

from omni_flow.data.messages import L1, L2, PoolInfo
from omni_flow.data.transfer.base import ArenaId


def arena_id(pool: int, tier: int) -> ArenaId:
    """Arena of tier L1 or L2 of the pool number `pool` (its place in the configuration)."""
    return ArenaId(2 * pool + (1 if tier == L1 else 2))


def host_tiers(pool: PoolInfo) -> tuple[tuple[int, int], ...]:
    """(tier, pages) of what of a pool lies in host memory; an L1 on a device reaches other nodes by way of L2."""
    tiers = ((L1, pool.l1_pages if pool.l1_device < 0 else 0), (L2, pool.l2_pages))
    return tuple((tier, pages) for tier, pages in tiers if pages)
