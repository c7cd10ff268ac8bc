"""The KV pools that the roles of a graph need. Pure.

A role class says so with a class method `kv_pools(**init)`, called with the role's `init`: the pools that one replica
needs, with room for that one. Pools of equal name are one pool, shared by every replica that names it: room adds up, in
every tier. What the jobs between tiers need beside it is added to the whole, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omni_flow.control.plan import Plan
from omni_flow.data.messages import L1, L2
from omni_flow.data.pool_room import beside_staging
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.deploy.errors import LaunchError


def kv_pools(plan: Plan, counts: Mapping[str, int]) -> tuple[PoolSpec, ...]:
    """The pools of all roles, `counts` replicas of each.

    Raises:
        LaunchError: a role cannot say what it needs, or two roles mean different pools by one name.
    """
    found: dict[str, PoolSpec] = {}
    first: dict[str, str] = {}
    for role in (plan_role.spec for plan_role in plan.roles):
        ask = getattr(role.factory, "kv_pools", None)
        if ask is None or not counts[role.name]:
            continue
        try:
            pools: tuple[PoolSpec, ...] = tuple(ask(**role.init))
        except Exception as error:  # role code may raise anything; it becomes the role's cause
            raise LaunchError({role.name: f"its pools are not known: {error}"}) from error
        for pool in pools:
            own = _times(pool, counts[role.name])
            there = found.get(pool.name)
            if there is None:
                found[pool.name], first[pool.name] = own, role.name
            elif _kind(there) != _kind(own):
                other = first[pool.name]
                raise LaunchError(
                    {role.name: f"its pool {pool.name!r} is not that of role {other!r}: give it another name"}
                )
            else:
                found[pool.name] = _sum(there, own)
    return tuple(_with_staging(pool) for pool in found.values())


def merged(given: tuple[PoolSpec, ...], needed: tuple[PoolSpec, ...]) -> tuple[PoolSpec, ...]:
    """What the caller gives goes before what the roles need."""
    names = {pool.name for pool in given}
    return (*given, *(pool for pool in needed if pool.name not in names))


def _with_staging(pool: PoolSpec) -> PoolSpec:
    """A pool in which all that was asked for is there beside the share of jobs, which goes before quotas and cache."""
    if not pool.l2_pages or pool.staging >= 0:
        return pool
    l1, l2 = beside_staging(L1, pool.l1_pages), beside_staging(L2, pool.l2_pages)
    return msgspec.structs.replace(pool, l1_pages=l1, l2_pages=l2)


def _times(pool: PoolSpec, count: int) -> PoolSpec:
    pages = {name: count * getattr(pool, name) for name in _ROOM}
    return msgspec.structs.replace(pool, **pages)


def _sum(one: PoolSpec, other: PoolSpec) -> PoolSpec:
    return msgspec.structs.replace(one, **{name: getattr(one, name) + getattr(other, name) for name in _ROOM})


def _kind(pool: PoolSpec) -> dict[str, Any]:
    """What a pool is beside its room."""
    return {name: value for name, value in msgspec.structs.asdict(pool).items() if name not in _ROOM}


_ROOM = ("l1_pages", "l2_pages", "l3_pages")
