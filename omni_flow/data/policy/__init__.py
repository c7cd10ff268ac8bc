"""Which page of a full tier goes next. Pure bookkeeping over page numbers; open `base.py` first.

`base.py` the contract, `queue.py` the compact FIFO of page numbers, `ghost.py` the memory of what was
evicted, then one policy a file: `s3fifo.py` (default), `lru.py`, `keep.py` (priorities and deadlines over any
other policy).
"""

from omni_flow.data.policy.base import EvictionPolicy, Mask, Pages, PolicyError
from omni_flow.data.policy.keep import KeepHints
from omni_flow.data.policy.lru import Lru
from omni_flow.data.policy.s3fifo import S3Fifo

__all__ = ["EvictionPolicy", "KeepHints", "Lru", "Mask", "Pages", "PolicyError", "S3Fifo", "make_policy"]


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Returns the policy called `name` ("s3fifo" or "lru") for pages 0 to `capacity` - 1, with keep hints
    over it.

    Raises:
        PolicyError: there is no such policy.
    """
    kinds: dict[str, type[S3Fifo] | type[Lru]] = {"s3fifo": S3Fifo, "lru": Lru}
    if name not in kinds:
        raise PolicyError(f"no eviction policy {name!r}; choose one of {', '.join(sorted(kinds))}")
    return KeepHints(kinds[name](capacity))
