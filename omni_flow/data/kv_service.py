"""The ops of the KV pools: from messages to `KvPool` and back."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.accounts import Account, Reservation
from omni_flow.data.errors import BadArgument, DataError, Refused, UnknownName
from omni_flow.data.kv_pool import KvPool
from omni_flow.data.messages import (
    L1,
    L2,
    L3,
    Abort,
    Commit,
    Committed,
    Found,
    Group,
    Hint,
    Lookup,
    PoolName,
    Reserve,
    Reserved,
    Unpin,
)
from omni_flow.data.page_table import RESERVED
from omni_flow.data.policy import KeepHints
from omni_flow.data.pool_pins import Pinned
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.prefix import first_needed, longest_prefix
from omni_flow.data.protocol import MAX_BATCH, Message, Op
from omni_flow.data.session import BaseService, Handler, Session

U8 = NDArray[np.uint8]
_MAX_TIMEOUT_MS = 24 * 3600 * 1000


def deadline_of(timeout_ms: int, now: float) -> float:
    """Deadline of a wait of `timeout_ms` that begins now.

    Raises:
        BadArgument: negative, or longer than a day.
    """
    if not 0 <= timeout_ms <= _MAX_TIMEOUT_MS:
        raise BadArgument(f"timeout of {timeout_ms} ms", f"0 to {_MAX_TIMEOUT_MS}")
    return now + timeout_ms / 1000


class KvService(BaseService):
    """All KV pools of the node."""

    def __init__(self, specs: Sequence[PoolSpec]) -> None:
        self._numbers = itertools.count(1)
        seed = int.from_bytes(os.urandom(8), "little")
        self.pools = {spec.name: KvPool(spec, self._numbers, seed) for spec in specs}
        self.prefetch: Callable[[Session, str, U8], None] = lambda _session, _pool, _keys: None

    @property
    def ops(self) -> Mapping[int, Handler]:
        return {
            Op.RESERVE: self._reserve,
            Op.COMMIT: self._commit,
            Op.ABORT: self._abort,
            Op.LOOKUP: self._lookup,
            Op.UNPIN: self._unpin,
            Op.PROBE: self._probe,
            Op.DROP: self._drop,
            Op.HINT: self._hint,
        }

    def pool(self, name: str) -> KvPool:
        """The pool of a name.

        Raises:
            UnknownName: there is none.
        """
        found = self.pools.get(name)
        if found is None:
            raise UnknownName(f"no pool {name!r}", f"there are {', '.join(self.pools) or 'none'}")
        return found

    def opened(self, session: Session) -> None:
        for name in session.quotas:
            self.pool(name)
        for name, pool in self.pools.items():
            quota = session.quotas.get(name, 0)
            if quota < 0:
                raise BadArgument(f"quota of {quota} pages", "give a positive number")
            pool.open(session.id, session.pid, session.name or session.role, quota)
        session.state["freed"] = {}

    def closed(self, session: Session) -> Iterator[None]:
        freed = session.state.setdefault("freed", {})
        for name, pool in self.pools.items():
            account = pool.accounts.get(session.id)
            if account is None:
                continue
            freed[name] = {"reserved": sum(account.reserved.values()), "pinned": account.pinned}
            yield from pool.close(session.id, time.monotonic())

    def tick(self, now: float) -> float | None:
        times = [t for t in (pool.tick(now) for pool in self.pools.values()) if t is not None]
        return min(times, default=None)

    def _writer(self, session: Session, pool: KvPool) -> Account:
        if session.read_only:
            raise Refused(f"session {session.id} is read-only", "connect without read_only")
        return pool.accounts[session.id]

    # -- ops ----------------------------------------------------------------------------------------------------

    def _reserve(self, session: Session, message: Message) -> None:
        body = message.body(Reserve)
        pool = self.pool(body.pool)
        account = self._writer(session, pool)
        pool.require(body.tier, account)
        if not 1 <= body.count <= MAX_BATCH:
            raise BadArgument(f"{body.count} pages at once", f"1 to {MAX_BATCH}")
        generation = pool.table.tier(body.tier).generation

        def taken(reservation: Reservation) -> None:
            slots = reservation.slots
            session.reply(message, Reserved(reservation.token, reservation.forced), (slots, generation[slots]))

        def failed(error: DataError) -> None:
            session.fail(message, error)

        now = time.monotonic()
        until = deadline_of(body.timeout_ms, now)
        pool.reserve(account, body.tier, body.count, body.least, now, until, taken, failed)

    def _commit(self, session: Session, message: Message) -> None:
        body = message.body(Commit)
        pool = self.pool(body.pool)
        account = self._writer(session, pool)
        positions = message.column(0, "<u4") if len(message.columns) > 1 else None
        keys = message.column(len(message.columns) - 1 if message.columns else 0, "key")
        token = account.tokens.get(body.token)
        tier = token.tier if token else L1
        lease, status, slots = pool.commit(account, body.token, positions, keys, body.pin, body.keep_duplicates)
        session.reply(message, Committed(lease), (status, slots, pool.table.tier(tier).generation[slots]))
        if status.any():
            pool.pump()

    def _abort(self, session: Session, message: Message) -> None:
        body = message.body(Abort)
        pool = self.pool(body.pool)
        account = self._writer(session, pool)
        positions = message.column(0, "<u4") if message.columns else None
        until = deadline_of(body.fence_ms, time.monotonic()) if body.fence_ms else None
        pool.abort(account, body.token, positions, until)
        session.reply(message)
        pool.pump()

    def _lookup(self, session: Session, message: Message) -> None:
        body = message.body(Lookup)
        if len(body.groups) != len(message.columns) or not body.groups:
            raise BadArgument(f"{len(body.groups)} groups, {len(message.columns)} columns of keys", "one each")
        if not body.tiers & (L1 | L2 | L3) or body.tiers & ~(L1 | L2 | L3):
            raise BadArgument(f"tiers {body.tiers}", "a sum of L1 (1), L2 (2), L3 (4)")
        names = {group.pool for group in body.groups}
        if body.pin and len(names) > 1:
            raise BadArgument(
                f"groups of {len(names)} pools in one pinned look-up", "keep the groups of a model in one pool"
            )
        pool = self.pool(body.groups[0].pool)
        pages, first, found = self._match(body, message)
        parts = found if len(found) == 1 else [Pinned(*(np.concatenate(column) for column in zip(*found, strict=True)))]
        whole = parts[0]
        account = pool.accounts[session.id]
        if body.pin and len(found) == 1 and not body.groups[0].window:
            stride = body.groups[0].stride
            fits = pool.fitting(account, whole) // stride
            if fits < pages:
                pages = fits
                cut = pages * stride
                whole = Pinned(whole.tiers[:cut], whole.slots[:cut], whole.generations[:cut])
        lease = pool.pin(account, whole) if body.pin and pages else 0
        pool.note(whole, sum(map(len, message.columns)) - len(whole.slots))
        session.reply(message, Found(pages, lease, first), whole)
        if body.prefetch and pool.table.l3_count:
            for group, keys in zip(body.groups, message.columns, strict=True):
                rest = keys[pages * group.stride :]
                below = pool.locate(rest, L1 | L2 | L3)[1]
                known = int((below != 0).argmin()) if not below.all() else len(below)
                wanted = rest[:known][below[:known] == L3]
                if len(wanted):
                    self.prefetch(session, group.pool, wanted)

    def _match(self, body: Lookup, message: Message) -> tuple[int, tuple[int, ...], list[Pinned]]:
        """Longest prefix over the groups, per group its first needed page and what was found from there on."""
        located = []
        hits = []
        for at, group in enumerate(body.groups):
            self._check_group(group)
            keys = message.column(at, "key")
            if len(keys) % group.stride:
                raise BadArgument(f"{len(keys)} keys at a stride of {group.stride}", "give whole pages")
            rows, tiers = self.pool(group.pool).locate(keys, body.tiers)
            located.append((rows, tiers))
            hit = tiers != 0
            hits.append(hit if group.stride == 1 else hit.reshape(-1, group.stride).all(axis=1))
        pages = longest_prefix(hits, [group.window for group in body.groups])
        first = tuple(first_needed(pages, group.window) for group in body.groups)
        found = []
        for group, start, (rows, tiers) in zip(body.groups, first, located, strict=True):
            cut = slice(start * group.stride, pages * group.stride)
            found.append(self.pool(group.pool).choose(rows[cut], tiers[cut]))
        return pages, first, found

    @staticmethod
    def _check_group(group: Group) -> None:
        if group.window < 0 or group.stride < 1:
            raise BadArgument(f"window {group.window}, stride {group.stride}", "window ≥ 0, stride ≥ 1")

    def _unpin(self, session: Session, message: Message) -> None:
        body = message.body(Unpin)
        positions = message.column(0, "<u4") if message.columns else None
        pool = self.pool(body.pool)
        pool.unpin(pool.accounts[session.id], body.lease, positions)
        session.reply(message)
        pool.pump()

    def _probe(self, session: Session, message: Message) -> None:
        pool = self.pool(message.body(PoolName).pool)
        key = message.one_key()
        if key is not None:
            row = pool.table.index.find_one(key)
            session.reply(message, None, (_BYTES[pool.table.tiers.item(row)] if row >= 0 else b"\0",))
            return
        keys = message.column(0, "key")
        session.reply(message, None, (pool.locate(keys, L1 | L2 | L3)[1],))

    def _drop(self, session: Session, message: Message) -> None:
        pool = self.pool(message.body(PoolName).pool)
        self._writer(session, pool)
        gone = pool.drop_keys(message.column(0, "key"))
        session.reply(message, None, (gone,))
        pool.pump()

    def _hint(self, session: Session, message: Message) -> None:
        """Keep pages longer: priority 0 to 3 for `ttl` seconds."""
        body = message.body(Hint)
        if not 0 <= body.priority <= 3 or not 0 <= body.ttl < 1 << 30:
            raise BadArgument(f"priority {body.priority} for {body.ttl} s", "priority 0 to 3, ttl ≥ 0")
        self.keep(self.pool(body.pool), message.column(0, "key"), body.priority, time.monotonic() + body.ttl)
        session.reply(message)

    @staticmethod
    def keep(pool: KvPool, keys: U8, priority: int, until: float) -> None:
        """Keep the copies of these pages in L1 and L2 at a priority until a time; 0: as any page."""
        rows, tiers = pool.locate(keys, L1 | L2)
        for bit in (L1, L2):
            policy = pool.policies[bit]
            slots = pool.table.slots_of(bit)[rows[(tiers & bit) != 0]]
            if len(slots) and isinstance(policy, KeepHints):
                policy.keep(slots, priority, until)

    # -- seeing it ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {}
        for name, pool in self.pools.items():
            table, page = pool.table, pool.spec.page_bytes
            for key, value in pool.counters.items():
                numbers[f"pool_{key}/{name}"] = value
            for tier in (table.l1, table.l2):
                if tier.capacity:
                    numbers[f"pool_{tier.name}_slots/{name}"] = tier.capacity
                    numbers[f"pool_{tier.name}_free/{name}"] = tier.free.count
                    numbers[f"pool_{tier.name}_bytes/{name}"] = (tier.capacity - tier.free.count) * page
                    numbers[f"pool_{tier.name}_pinned/{name}"] = tier.pinned
                    numbers[f"pool_{tier.name}_quarantined/{name}"] = pool.in_quarantine(tier.bit)
                    numbers[f"pool_{tier.name}_waiting/{name}"] = pool.waiting(tier.bit)
            numbers[f"pool_l3_pages/{name}"] = table.l3_count
            numbers[f"pool_l3_bytes/{name}"] = table.l3_count * page
            numbers[f"pool_objects/{name}"] = len(table.index)
            numbers[f"pool_leases/{name}"] = sum(len(a.leases) for a in pool.accounts.values())
            numbers[f"pool_reservations/{name}"] = sum(len(a.tokens) for a in pool.accounts.values())
            numbers[f"pool_metadata_bytes/{name}"] = pool.nbytes
        return numbers

    def held(self, session: Session) -> dict[str, Any]:
        """`held`: by pool, pages reserved and pinned."""
        held = {name: pool.accounts.get(session.id) for name, pool in self.pools.items()}
        return {"held": {name: [sum(a.reserved.values()), a.pinned] for name, a in held.items() if a is not None}}

    def overview(self) -> dict[str, Any]:
        """`pools`: slots of each tier and what they are."""
        return {
            "pools": [
                {
                    "pool": name,
                    "tier": tier.name,
                    "slots": tier.capacity,
                    "free": tier.free.count,
                    "reserved": int(np.count_nonzero(tier.state == RESERVED)),
                    "pinned": tier.pinned,
                    "quarantined": pool.in_quarantine(tier.bit),
                    "waiting": pool.waiting(tier.bit),
                }
                for name, pool in self.pools.items()
                for tier in (pool.table.l1, pool.table.l2)
                if tier.capacity
            ]
        }

    def check(self) -> list[str]:
        return [f"pool {name}: {fault}" for name, pool in self.pools.items() for fault in pool.check_integrity()]


_BYTES = tuple(bytes((i,)) for i in range(256))
