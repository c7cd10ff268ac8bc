"""The KV pools that roles ask for: room adds up over replicas and roles, and one name means one pool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from omni_flow import Graph, launch
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.kv_pool import KvPool
from omni_flow.data.messages import L1, L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.deploy.errors import LaunchError
from omni_flow.deploy.memory import Memory
from omni_flow.deploy.pools import kv_pools


class Pooled:
    """Asks for a pool of `pages`, and `below` in CPU memory; its `setup` looks at what there is."""

    def __init__(self, pages: int, size: int = 64, below: int = 0) -> None:
        self.seen: dict[str, int] = {}

    @classmethod
    def kv_pools(cls, pages: int, size: int = 64, below: int = 0) -> list[PoolSpec]:
        if pages < 1:
            raise ValueError(f"{pages} pages")
        return [PoolSpec(name="kv", page_bytes=size, l1_pages=pages, l2_pages=below, padding=1)]

    async def setup(self, data: Any) -> None:
        if data is not None:
            with MemoryManagerClient(data.address, name="test") as client:
                self.seen = {pool.name: pool.l1_pages for pool in client.welcome.pools}

    async def look(self, x: int) -> dict[str, int]:
        return self.seen


def graph(**roles: dict[str, Any]) -> Graph:
    g = Graph("pooled")
    x = g.placeholder("x", int)
    g.output(
        **{
            name: g.role(name, Pooled, init=init).interface("look", [[x]], ["seen"]).seen
            for name, init in roles.items()
        }
    )
    return g


def test_the_room_of_all_replicas_of_all_roles_adds_up() -> None:
    plan = graph(a={"pages": 8}, b={"pages": 3}).compile().plan
    assert kv_pools(plan, {"a": 2, "b": 1}) == (PoolSpec(name="kv", page_bytes=64, l1_pages=19, padding=1),)


@pytest.mark.parametrize(("pages", "below"), [(2, 1), (40, 7), (500, 90), (9000, 20_000)])
def test_all_that_roles_ask_for_is_there_beside_the_share_of_jobs_between_tiers(pages: int, below: int) -> None:
    """One of the two roles asks for no L2: its quota must fit as well."""
    plan = graph(a={"pages": pages, "below": below}, b={"pages": pages}).compile().plan
    (pool,) = kv_pools(plan, {"a": 2, "b": 1})
    room = KvPool(pool)
    assert room.staging[L1].limit > 0
    assert room.shared[L1].limit + pool.padding >= 3 * pages
    assert room.shared[L2].limit >= 2 * below
    for tier, asked in ((pool.l1_pages, 3 * pages), (pool.l2_pages, 2 * below)):
        assert tier - asked <= min(256, 1 + asked // 3)


def test_two_pools_of_one_name_are_refused_with_both_roles() -> None:
    with pytest.raises(LaunchError, match=r"role 'b': its pool 'kv' is not that of role 'a'"):
        launch(graph(a={"pages": 8}, b={"pages": 8, "size": 32}))


def test_a_role_that_cannot_say_what_it_needs_is_named() -> None:
    with pytest.raises(LaunchError, match=r"role 'a': its pools are not known: 0 pages"):
        launch(graph(a={"pages": 0}))


def test_roles_find_their_pool_while_they_load() -> None:
    with launch(graph(a={"pages": 8}), replicas={"a": 2}) as app:
        assert app.submit(x=1).result(timeout=20) == {"a": {"kv": 16}}


def test_a_pool_that_the_caller_gives_goes_before_what_roles_ask_for() -> None:
    given = PoolSpec(name="kv", page_bytes=64, l1_pages=99)
    with launch(graph(a={"pages": 8}), memory=Memory(pools=(given,))) as app:
        assert app.submit(x=1).result(timeout=20) == {"a": {"kv": 99}}


def test_without_memory_a_role_gets_none() -> None:
    with launch(graph(a={"pages": 8}), memory=None) as app:
        assert app.submit(x=1).result(timeout=20) == {"a": {}}


def test_a_memory_manager_that_does_not_start_is_the_reason_given_and_nothing_is_left() -> None:
    before = children()
    with pytest.raises(LaunchError, match=r"the memory manager did not start: .*bytes, \d+ are available"):
        launch(graph(a={"pages": 1 << 20, "size": 1 << 30}), memory=Memory(populate="now"))
    assert children() == before


def children() -> list[str]:
    """Process ids of this process's children."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
