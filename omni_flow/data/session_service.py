"""KV pages of sessions: kept between turns, moved down when their time is over, dropped when the session ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import BadArgument, Refused
from omni_flow.data.kv_pool import KvPool
from omni_flow.data.kv_service import KvService
from omni_flow.data.messages import L1, L2, L3, MAX_NAME, SessionEnd, SessionKeep, SessionPages, SessionTiers
from omni_flow.data.page_table import SEALED
from omni_flow.data.protocol import Message, Op, keys_array
from omni_flow.data.session import BaseService, Handler, Session
from omni_flow.data.session_leases import NEVER, Change, Key, SessionLeases, split

SHARE: Final = 0.5
"""Of a pool's L1, what all sessions together may keep: requests without a session find room for their cache too."""
LEVEL: Final = 2
"""Priority of kept pages; see `Hint`."""
SLICE_KEYS: Final = 64


@dataclass(slots=True, eq=False)
class _Drop:
    """Pages to be dropped, the last first, with the `copies` they had when their session ended."""

    pool: str
    keys: list[Key]
    copies: NDArray[np.uint64]


class SessionService(BaseService):
    """Leases of sessions over the pools of a node. Kept pages go last, but they do go: no session starves a request."""

    def __init__(self, kv: KvService) -> None:
        self._kv = kv
        self.leases = {
            name: SessionLeases(max(1, int(SHARE * pool.table.l1.capacity)), max(1, pool.table.capacity))
            for name, pool in kv.pools.items()
        }
        self._drops: deque[_Drop] = deque()
        self._sinking: dict[str, list[Key]] = {name: [] for name in kv.pools}
        self._dropped = dict.fromkeys(kv.pools, 0)

    @property
    def ops(self) -> Mapping[int, Handler]:
        return {Op.S_KEEP: self._keep, Op.S_END: self._end, Op.S_TIERS: self._tiers}

    def _keep(self, session: Session, message: Message) -> None:
        body = message.body(SessionKeep)
        pool = self._kv.pool(body.pool)
        _writes(session)
        if not 0 < len(body.session) <= MAX_NAME or len(body.chain) > MAX_NAME:
            raise BadArgument(f"a session's name of {len(body.session)} characters", f"1 to {MAX_NAME}")
        if not 0 < body.ttl < 1 << 30 or body.tokens < 1:
            raise BadArgument(f"keep pages of {body.tokens} tokens for {body.ttl} s", "positive numbers")
        now = time.monotonic()
        keys = split(message.column(0, "key").tobytes())
        change = self.leases[body.pool].renew(session.id, body.session, body.chain, keys, body.tokens, now, body.ttl)
        self._apply(body.pool, change)
        self._kv.keep(pool, keys_array(change.keep), LEVEL, now + body.ttl)
        session.reply(message)

    def _end(self, session: Session, message: Message) -> None:
        name = message.body(SessionEnd).session
        _writes(session)
        for pool, leases in self.leases.items():
            self._apply(pool, leases.end(session.id, name))
        if self._drops:  # so that what follows this message does not find the pages of a short session
            self._drop_slice()
        session.reply(message)

    def _tiers(self, session: Session, message: Message) -> None:
        """What a session has in each tier: a page that has copies in several counts in each of them."""
        name = message.body(SessionEnd).session
        found = []
        for pool_name, leases in self.leases.items():
            pool = self._kv.pools[pool_name]
            for lease in leases.of(name):
                tiers = pool.locate(keys_array(lease.keys), L1 | L2 | L3)[1]
                counts = [int(((tiers & bit) != 0).sum()) for bit in (L1, L2, L3)]
                found.append(SessionPages(pool_name, pool.spec.page_bytes, lease.tokens, lease.kept, *counts))
        session.reply(message, SessionTiers(tuple(found)))

    def closed(self, session: Session) -> Iterator[None]:
        for pool, leases in self.leases.items():
            self._apply(pool, leases.leave(session.id))
            yield

    def tick(self, now: float) -> float | None:
        for name, leases in self.leases.items():
            gone = leases.expire(now)
            if gone:
                self._kv.keep(self._kv.pools[name], keys_array(gone), 0, 0.0)
                self._sinking[name] += gone
            if self._sinking[name]:
                sinking = [key for key in self._sinking[name] if not leases.keeps(key)]
                self._sinking[name] = _demote(self._kv.pools[name], sinking, now) if sinking else []
        if self._drops:
            self._drop_slice()
        if self._drops:
            return now
        return min((leases.due for leases in self.leases.values() if leases.due < NEVER), default=None)

    def _apply(self, pool: str, change: Change) -> None:
        if change.let_go:
            self._kv.keep(self._kv.pools[pool], keys_array(change.let_go), 0, 0.0)
        if change.drop:
            self._drops.append(_Drop(pool, list(change.drop), self._kv.pools[pool].copies(keys_array(change.drop))))

    def _drop_slice(self) -> None:
        """Drop some pages. Those that somebody has pinned stay, as any page that is used, and so do those that were
        stored anew, or that another session keeps, since the session ended: nobody has said that they are not needed.
        """
        drop = self._drops[0]
        pool, leases = self._kv.pools[drop.pool], self.leases[drop.pool]
        at = max(0, len(drop.keys) - SLICE_KEYS)
        some, were = drop.keys[at:], drop.copies[at:]
        del drop.keys[at:]
        drop.copies = drop.copies[:at]
        if not drop.keys:
            self._drops.popleft()
        same = ((pool.copies(keys_array(some)) == were) & (were != 0)).any(axis=1).tolist()
        chosen = [key for key, old in zip(some, same, strict=True) if old and not leases.keeps(key)]
        self._dropped[drop.pool] += int(pool.drop_keys(keys_array(chosen)).sum())
        pool.pump()

    def stats(self) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {}
        for name, leases in self.leases.items():
            numbers[f"pool_session_leases/{name}"] = len(leases)
            numbers[f"pool_session_kept_pages/{name}"] = leases.kept
            numbers[f"pool_session_dropped/{name}"] = self._dropped[name]
        return numbers

    def held(self, session: Session) -> dict[str, Any]:
        """`kept`: by pool, leases of sessions between turns that this connection renewed, and the pages they keep."""
        found = {name: leases.held_by(session.id) for name, leases in self.leases.items()}
        kept = {name: [number, pages] for name, (number, pages) in found.items() if number}
        return {"kept": kept} if kept else {}

    def check(self) -> list[str]:
        return [f"pool {name}: {fault}" for name, leases in self.leases.items() for fault in leases.check()]


def _writes(session: Session) -> None:
    if session.read_only:
        raise Refused(f"session {session.id} is read-only", "connect without read_only")


def _demote(pool: KvPool, keys: list[Key], now: float) -> list[Key]:
    """Move pages that are in L1 only, and that nobody uses, one tier down, where there is one.

    Returns those whose turn comes when the jobs that run now have ended.
    """
    if pool.demoting(L1):
        return keys
    rows, tiers = pool.locate(keys_array(keys), L1 | L2 | L3)
    table = pool.table
    alone = np.flatnonzero(tiers == L1)
    slots = table.slot1[rows[alone]]
    idle = (table.l1.state[slots] == SEALED) & (table.l1.pins[slots] == 0)
    alone, slots = alone[idle], slots[idle]
    planned = pool.demote(L1, slots, now) if len(slots) and pool.spec.demote else 0
    return [keys[at] for at in alone[planned:]] if planned else []
