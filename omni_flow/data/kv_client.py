"""The KV calls of a client, for the blocking, the posting and the asynchronous one.

All build the same requests and read the same replies. Results own their memory. What can't be meant, of the wrong type,
negative or too long, is refused with `BadArgument`, which names the argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from reprlib import repr as brief
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.arguments import DAY_S, flag, milliseconds, real, text, whole
from omni_flow.data.errors import BadArgument
from omni_flow.data.messages import (
    L1,
    L2,
    MAX_NAME,
    Abort,
    Commit,
    Committed,
    Found,
    Group,
    Hint,
    JobAdd,
    Lookup,
    PoolName,
    Reserve,
    Reserved,
    SessionEnd,
    SessionKeep,
    SessionPages,
    SessionTiers,
    Unpin,
)
from omni_flow.data.protocol import MAX_BATCH, Column, Message, Op, keys_array

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
Keys = Sequence[bytes] | U8


class Room(NamedTuple):
    """Reserved slots: write the pages there, then commit. `forced`: cached pages were dropped for them at the end of
    the wait, as nobody had written them down a tier in time."""

    token: int
    slots: U32
    generations: U32
    forced: bool = False


class Stored(NamedTuple):
    """What a commit made of the pages.

    Args:
        lease: the pins on them, 0 if none were asked for.
        status: 0 stored, 1 was there already.
        slots: where the page is now.
    """

    lease: int
    status: U8
    slots: U32
    generations: U32


class Match(NamedTuple):
    """A found prefix.

    Args:
        pages: its length in pages.
        lease: the pins on it, 0 if there are none.
        first: per group, the first page that is needed (not 0 only where a window is given).
        tiers, slots, generations: of the needed pages of all groups, one group behind the other; L3 has no slot.
    """

    pages: int
    lease: int
    first: tuple[int, ...]
    tiers: U8
    slots: U32
    generations: U32


class Request(NamedTuple):
    op: int
    body: msgspec.Struct | None
    columns: Sequence[Column]
    wait: float


def positions_column(positions: Sequence[int] | U32 | None) -> tuple[Column, ...]:
    if positions is None:
        return ()
    try:
        numbers = np.asarray(positions)
    except ValueError as error:
        raise BadArgument(f"positions: {error}", "give a list of whole numbers") from error
    if numbers.dtype != np.uint32:
        whole_ones = numbers.dtype.kind in "iu" or not numbers.size
        if not whole_ones or (numbers.size and not 0 <= numbers.min() <= numbers.max() <= 0xFFFFFFFF):
            raise BadArgument(f"positions: {brief(positions)}", "give places in the reservation or lease, from 0 on")
        numbers = numbers.astype(np.uint32)
    if numbers.ndim != 1:
        raise BadArgument(f"positions of shape {numbers.shape}", "give a list of whole numbers")
    return (numbers,)


def keys_column(keys: Keys) -> Column:
    column = keys_array(keys)
    if len(column) > MAX_BATCH:
        raise BadArgument(f"{len(column)} keys in one call", f"at most {MAX_BATCH}")
    return column


def pool_name(pool: str) -> str:
    return text("pool", pool, MAX_NAME)


def reserve_request(pool: str, count: int, least: int, timeout: float, tier: int) -> Request:
    body = Reserve(
        pool_name(pool),
        whole("count", count, 1, MAX_BATCH),
        whole("least", least, 0, MAX_BATCH),
        milliseconds("timeout", timeout),
        whole("tier", tier, 0, 255),
    )
    return Request(Op.RESERVE, body, (), timeout)


def room_of(reply: Message) -> Room:
    body = reply.body(Reserved)
    return Room(body.token, reply.column(0, "<u4").copy(), reply.column(1, "<u4").copy(), body.forced)


def commit_request(
    pool: str, token: int, keys: Keys, positions: Sequence[int] | U32 | None, pin: bool, keep_duplicates: bool
) -> Request:
    columns = (*positions_column(positions), keys_column(keys))
    pin, keep = flag("pin", pin), flag("keep_duplicates", keep_duplicates)
    return Request(Op.COMMIT, Commit(pool_name(pool), whole("token", token), pin, keep), columns, 0.0)


def stored_of(reply: Message) -> Stored:
    lease = reply.body(Committed).lease
    return Stored(lease, reply.column(0, "|u1").copy(), reply.column(1, "<u4").copy(), reply.column(2, "<u4").copy())


def abort_request(pool: str, token: int, positions: Sequence[int] | U32 | None, fence_ms: int = 0) -> Request:
    body = Abort(pool_name(pool), whole("token", token), whole("fence_ms", fence_ms, 0, int(DAY_S * 1000)))
    return Request(Op.ABORT, body, positions_column(positions), 0.0)


def lookup_request(pool: str, keys: Keys, pin: bool, tiers: int, prefetch: bool = False) -> Request:
    groups = (Group(pool_name(pool)),)
    body = Lookup(groups, flag("pin", pin), whole("tiers", tiers, 0, 255), flag("prefetch", prefetch))
    return Request(Op.LOOKUP, body, (keys_column(keys),), 0.0)


def groups_request(groups: Sequence[tuple[Group, Keys]], pin: bool, tiers: int) -> Request:
    for group, _ in groups:
        pool_name(group.pool)
        whole("window", group.window)
        whole("stride", group.stride, 1, MAX_BATCH)
    body = Lookup(tuple(group for group, _ in groups), flag("pin", pin), whole("tiers", tiers, 0, 255))
    columns = tuple(keys_array(keys) for _, keys in groups)
    if sum(map(len, columns)) > MAX_BATCH:
        raise BadArgument(f"{sum(map(len, columns))} keys in one look-up", f"at most {MAX_BATCH}")
    return Request(Op.LOOKUP, body, columns, 0.0)


def unpin_request(pool: str, lease: int, positions: Sequence[int] | U32 | None) -> Request:
    return Request(Op.UNPIN, Unpin(pool_name(pool), whole("lease", lease)), positions_column(positions), 0.0)


def probe_request(pool: str, keys: Keys) -> Request:
    return Request(Op.PROBE, PoolName(pool_name(pool)), (keys_column(keys),), 0.0)


def drop_request(pool: str, keys: Keys) -> Request:
    return Request(Op.DROP, PoolName(pool_name(pool)), (keys_column(keys),), 0.0)


def per_key(reply: Message) -> U8:
    """One number per key: tiers of a probe, whether it worked."""
    return reply.column(0, "|u1").copy()


def bring_request(kind: str, pool: str, keys: Keys, peer: str, tier: int, timeout: float) -> Request:
    milli = milliseconds("timeout", timeout)
    body = JobAdd(kind, pool_name(pool), milli, text("peer", peer, MAX_NAME, least=0), whole("tier", tier, 0, 255))
    return Request(Op.JOB_ADD, body, (keys_column(keys),), timeout)


def hint_request(pool: str, keys: Keys, priority: int, ttl: int) -> Request:
    body = Hint(pool_name(pool), whole("priority", priority, 0, 3), whole("ttl", ttl, 0, (1 << 30) - 1))
    return Request(Op.HINT, body, (keys_column(keys),), 0.0)


def keep_session_request(pool: str, session: str, chain: bytes, keys: Keys, tokens: int, ttl: float) -> Request:
    if not isinstance(chain, bytes) or len(chain) > MAX_NAME:
        raise BadArgument(f"chain: {brief(chain)}", f"give at most {MAX_NAME} bytes")
    session, tokens = text("session", session, MAX_NAME), whole("tokens", tokens, 1)
    body = SessionKeep(pool_name(pool), session, chain, tokens, real("ttl", ttl, 0.0, 1 << 30))
    return Request(Op.S_KEEP, body, (keys_array(keys)[:MAX_BATCH],), 0.0)


def end_session_request(session: str) -> Request:
    return Request(Op.S_END, SessionEnd(text("session", session, MAX_NAME)), (), 0.0)


def session_tiers_request(session: str) -> Request:
    return Request(Op.S_TIERS, SessionEnd(text("session", session, MAX_NAME)), (), 0.0)


def match_of(reply: Message) -> Match:
    found = reply.body(Found)
    return Match(
        found.pages,
        found.lease,
        found.first,
        reply.column(0, "|u1").copy(),
        reply.column(1, "<u4").copy(),
        reply.column(2, "<u4").copy(),
    )


class KvCalls(ABC):
    """KV pages over a blocking `call`."""

    timeout: float

    @abstractmethod
    def call(
        self,
        op: int,
        body: msgspec.Struct | None = None,
        columns: Sequence[Column] = (),
        fds: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Message:
        """One request and its reply."""

    def _ask(self, request: Request) -> Message:
        return self.call(request.op, request.body, request.columns, timeout=self.timeout + request.wait)

    def reserve(self, pool: str, count: int, *, least: int = 0, timeout: float = 0.0, tier: int = L1) -> Room:
        """Take `count` slots, at least `least` (0: all), waiting up to `timeout` seconds.

        Raises:
            PoolFull: not to be had in time; names the holders.
            NeverFits: no waiting helps.
        """
        return room_of(self._ask(reserve_request(pool, count, least, timeout, tier)))

    def commit(
        self,
        pool: str,
        token: int,
        keys: Keys,
        *,
        positions: Sequence[int] | U32 | None = None,
        pin: bool = False,
        keep_duplicates: bool = False,
    ) -> Stored:
        """Make written pages visible under their keys; all of the reservation, or the `positions` of it."""
        return stored_of(self._ask(commit_request(pool, token, keys, positions, pin, keep_duplicates)))

    def abort(self, pool: str, token: int, *, positions: Sequence[int] | U32 | None = None, fence_ms: int = 0) -> None:
        """Give reserved slots back; nobody else gets them before `fence_ms` have passed."""
        self._ask(abort_request(pool, token, positions, fence_ms))

    def lookup(self, pool: str, keys: Keys, *, pin: bool = True, tiers: int = L1 | L2, prefetch: bool = False) -> Match:
        """Longest prefix of `keys` that is there, pinned in the same step.

        Args:
            prefetch: start bringing what follows and lies in L3 only into L2.
        """
        return match_of(self._ask(lookup_request(pool, keys, pin, tiers, prefetch)))

    def lookup_groups(self, groups: Sequence[tuple[Group, Keys]], *, pin: bool = True, tiers: int = L1 | L2) -> Match:
        """Longest prefix that every attention group can serve."""
        return match_of(self._ask(groups_request(groups, pin, tiers)))

    def unpin(self, pool: str, lease: int, *, positions: Sequence[int] | U32 | None = None) -> None:
        """Give pins back: the whole lease, or the `positions` of it."""
        self._ask(unpin_request(pool, lease, positions))

    def probe(self, pool: str, keys: Keys) -> U8:
        """Tier bitmap per key, 0 where unknown. Pins nothing and touches nothing."""
        return per_key(self._ask(probe_request(pool, keys)))

    def fetch(self, pool: str, keys: Keys, *, tier: int = L1, timeout: float = 10.0) -> U8:
        """Bring copies of pages into a tier, up or down; per key 1 once it is there. Pins nothing: look up then."""
        return self._bring("fetch", pool, keys, "", tier, timeout)

    def pull(self, pool: str, keys: Keys, peer: str, *, timeout: float = 30.0) -> U8:
        """Bring pages from another node; per key 1 once it is here."""
        return self._bring("pull", pool, keys, peer, L1, timeout)

    def push(self, pool: str, keys: Keys, peer: str, *, timeout: float = 30.0) -> U8:
        """Send pages to another node; per key 1 once it is there."""
        return self._bring("push", pool, keys, peer, L1, timeout)

    def _bring(self, kind: str, pool: str, keys: Keys, peer: str, tier: int, timeout: float) -> U8:
        return per_key(self._ask(bring_request(kind, pool, keys, peer, tier, timeout)))

    def drop(self, pool: str, keys: Keys) -> U8:
        """Forget objects nobody has pinned; per key 1 if it is gone."""
        return per_key(self._ask(drop_request(pool, keys)))

    def hint(self, pool: str, keys: Keys, priority: int, ttl: int) -> None:
        """Ask to keep pages: priority 0 to 3 for `ttl` seconds."""
        self._ask(hint_request(pool, keys, priority, ttl))

    def keep_session(self, pool: str, session: str, chain: bytes, keys: Keys, *, tokens: int, ttl: float) -> None:
        """A turn of a session ended with these pages of `tokens` tokens: they go last for `ttl` seconds.

        Pages of its last turn on this `chain` that are not among them are let go. When this connection ends, so does
        what it kept. More than `MAX_BATCH` keys: the first of them.
        """
        self._ask(keep_session_request(pool, session, chain, keys, tokens, ttl))

    def end_session(self, session: str) -> None:
        """The session is over: its pages that no other session has, and that nobody has pinned, are dropped."""
        self._ask(end_session_request(session))

    def session_tiers(self, session: str) -> tuple[SessionPages, ...]:
        """What a session has, by pool and chain; empty for one that is not known."""
        return self._ask(session_tiers_request(session)).body(SessionTiers).pages
