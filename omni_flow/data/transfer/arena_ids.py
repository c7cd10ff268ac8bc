"""Numbers of the arenas of KV pools in transfers: the same rule on every node, so they need not be told."""

from omni_flow.data.messages import L1
from omni_flow.data.transfer.base import ArenaId


def arena_id(pool: int, tier: int) -> ArenaId:
    """Arena of tier L1 or L2 of the pool number `pool` (its place in the configuration)."""
    return ArenaId(2 * pool + (1 if tier == L1 else 2))
