"""What lies in a TempBuffer pool and whose it is, for people. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from omni_flow.data.temp_account import TempAccount
from omni_flow.data.temp_pool import TempPool

_ROWS: Final = 100


def held(account: TempAccount) -> dict[str, int]:
    """What one client has: slots of its own and their bytes, of those the ones it keeps unused; shares of others'."""
    return {
        "slots": len(account.owned),
        "bytes": account.bytes,
        "unused": len(account.kept),
        "shares": account.shares(),
    }


def overview(pool: TempPool) -> dict[str, Any]:
    """Bytes, slots by size (the largest first), and those that no living producer answers for."""
    slots = [*pool.slots.values(), *pool.closing]
    count: Counter[int] = Counter(slot.size for slot in slots)
    published: Counter[int] = Counter(slot.size for slot in slots if pool.is_published(slot))
    without: Counter[int] = Counter(slot.size for slot in slots if not slot.owner)
    return {
        "bytes": pool.capacity(),
        "free_bytes": pool.free_bytes(),
        "slots": [
            {"size": size, "slots": count[size], "published": published[size], "without_owner": without[size]}
            for size in sorted(count, reverse=True)[:_ROWS]
        ],
        "without_owner": {
            "slots": without.total(),
            "bytes": sum(size * n for size, n in without.items()),
            "settled": sum(slot.settled for slot in pool.orphans.values()),
            "held_by": _holders(pool, {slot.number for slot in slots if not slot.owner}),
        },
    }


def _holders(pool: TempPool, numbers: set[int]) -> list[list[int]]:
    """Sessions that hold shares of these slots, and of how many; those with most first."""
    found = [(session, len(numbers.intersection(a.slots_held()))) for session, a in pool.accounts.items()]
    return [list(pair) for pair in sorted(found, key=lambda pair: -pair[1])[:_ROWS] if pair[1]]
