"""Which movers pools need, and what of them a directory on a disk holds."""

from __future__ import annotations

import pytest

from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.ssd import BadSsdConfig
from omni_flow.data.tiers import movers_of, with_l3

FLAT = PoolSpec(name="flat", page_bytes=4096, l1_pages=8)
DEEP = PoolSpec(name="deep", page_bytes=4096, l1_pages=8, l2_pages=8)
ON_GPU = PoolSpec(name="gpu", page_bytes=4096, l1_pages=8, l2_pages=8, l1_device=0)


def test_pools_with_an_l2_have_the_copy_mover_of_where_their_l1_lies() -> None:
    assert movers_of([FLAT]) == ()
    assert movers_of([FLAT, DEEP, DEEP]) == (("copy",),)
    assert movers_of([DEEP, ON_GPU]) == (("copy",), ("cuda-copy",))


def test_pools_with_an_l2_have_as_many_objects_on_the_disk_as_fit_unless_they_say_how_many() -> None:
    own = PoolSpec(name="own", page_bytes=1 << 20, l1_pages=8, l2_pages=8, l3_pages=5)
    large = PoolSpec(name="large", page_bytes=1 << 20, l1_pages=8, l2_pages=8)
    found = with_l3([FLAT, DEEP, own, large], "/nowhere", 3 << 30)
    assert {pool.name: pool.l3_pages for pool in found} == {"flat": 0, "deep": 1 << 17, "own": 5, "large": 1024}


@pytest.mark.parametrize(
    ("pools", "size", "said"),
    [([FLAT], 1 << 30, "needs a pool with an L2"), ([DEEP], 1 << 20, "1048576 bytes holds"), ([DEEP], -1, "-1 bytes")],
)
def test_an_ssd_tier_that_cannot_be_is_refused(pools: list[PoolSpec], size: int, said: str) -> None:
    with pytest.raises(BadSsdConfig, match=said):
        with_l3(pools, "/nowhere", size)
