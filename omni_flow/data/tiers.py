"""The tiers below L1: the movers that pools need for them, and how much of a pool a disk holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.ssd.config import SsdConfig
from omni_flow.data.ssd.errors import BadSsdConfig


def movers_of(specs: Sequence[PoolSpec]) -> tuple[tuple[str, ...], ...]:
    """The copy movers that pools with an L2 need."""
    kinds = {"cuda-copy" if spec.l1_device >= 0 else "copy" for spec in specs if spec.l2_pages}
    return tuple((kind,) for kind in sorted(kinds))


def with_l3(specs: Sequence[PoolSpec], directory: str, cap_bytes: int) -> tuple[PoolSpec, ...]:
    """The pools, those with an L2 with an L3 as well: of as many objects as fit, where they name no number themselves.

    Args:
        directory: of the SSD tier; nothing is looked at there.
        cap_bytes: most bytes there of all pools together, split evenly.

    Raises:
        BadSsdConfig: no pool has an L2, or the bytes are too few.
    """
    deep = [spec for spec in specs if spec.l2_pages]
    if not deep:
        raise BadSsdConfig("an SSD tier needs a pool with an L2", "give a pool l2_pages, an engine role l2_tokens")
    share = cap_bytes // len(deep)
    full = []
    for spec in specs:
        if spec.l2_pages:
            config = SsdConfig(path=Path(directory), cap_bytes=share, largest=spec.page_bytes)
            config.segment()
            fit = min(share // spec.page_bytes, config.records())
            spec = msgspec.structs.replace(spec, l3_pages=spec.l3_pages or fit)
        full.append(spec)
    return tuple(full)


def ssd_mover(directory: str, cap_bytes: int) -> tuple[str, ...]:
    """The mover that keeps an SSD tier there, see `ServerConfig.movers`."""
    return ("{python}", "-m", "omni_flow.data.ssd.mover", "{path}", directory, str(cap_bytes))
