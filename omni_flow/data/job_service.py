"""The ops of movers and of those who ask for pages to be brought somewhere: from messages to `PoolJobs` and back."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import BadArgument, BadToken, NoMover, Refused
from omni_flow.data.fetches import Fetch, Fetches
from omni_flow.data.jobs import BATCH, NO_PLACES, PoolJobs, Work
from omni_flow.data.kv_service import KvService, deadline_of
from omni_flow.data.lost_movers import LostMovers, Watcher
from omni_flow.data.messages import (
    L1,
    L2,
    L3,
    SHOWN_ROWS,
    SHOWN_TEXT,
    TIER_NAMES,
    Job,
    JobAdd,
    JobCancel,
    JobDone,
    L3Change,
    TierState,
)
from omni_flow.data.protocol import MAX_BATCH, Message, Op
from omni_flow.data.session import BaseService, Handler, Session

log = logging.getLogger("omni_flow.data")
U8 = NDArray[np.uint8]
DEADLINE_S: Final = 30.0
GRACE_S: Final = 10.0
MOVER_WAIT_S: Final = 10.0
"""How long what needs a mover waits for one that this manager is starting, within its own deadline."""
PUT_OFF_S: Final = 1.0
"""How long pages that would go down by themselves stay for the sake of those who wait for others."""
KINDS: Final = ("copy", "cuda-copy", "store", "load", "pull", "push")
_SLICE_ROWS: Final = 4096


class JobService(BaseService):
    """Jobs of all pools and the movers that execute them.

    Args:
        kv: the pools.
        watcher: tells when the process of a lost mover has gone.
        prefetch_bytes: bound on what prefetches may have under way.

    Who runs movers sets `end_process(pid)`, which kills one that does not obey, and `is_restarted(pid)`, whether a
    mover that was lost will be replaced.
    """

    def __init__(self, kv: KvService, watcher: Watcher, prefetch_bytes: int = 256 << 20) -> None:
        self._kv = kv
        self.jobs = {name: PoolJobs(pool) for name, pool in kv.pools.items()}
        self._numbers = itertools.count(1)
        self._movers: dict[int, Session] = {}
        self._load: dict[int, int] = {}
        self._expected: dict[str, float] = {}
        self._over_since: dict[tuple[str, int], float] = {}
        self._lost = LostMovers(watcher, time.monotonic, self._freed)
        self.end_process: Callable[[int], None] = lambda _pid: None
        self.is_restarted: Callable[[int], bool] = lambda _pid: False
        self._fetches = Fetches(kv, self.jobs, self._mover, self._until, self._send, self._numbers, prefetch_bytes)
        self.counters: dict[str, int] = dict.fromkeys(
            ("jobs", "jobs_cancelled", "jobs_failed", "movers_lost", "fetches", "l3_off"), 0
        )
        kv.prefetch = self._fetches.prefetch
        for name, pool in kv.pools.items():
            pool.demote = self._demoter(name)

    @property
    def ops(self) -> Mapping[int, Handler]:
        return {
            Op.JOB_ADD: self._add,
            Op.JOB_DONE: self._done,
            Op.JOB_CANCEL: self._cancel,
            Op.L3_CHANGE: self._l3_change,
            Op.TIER_STATE: self._tier_state,
        }

    def opened(self, session: Session) -> None:
        if session.role != "mover":
            return
        unknown = set(session.kinds) - set(KINDS)
        if unknown or not session.kinds:
            raise BadArgument(f"mover of kinds {session.kinds}", f"some of {', '.join(KINDS)}")
        self._movers[session.id] = session
        self._load[session.id] = 0
        self._fetches.dirty = True

    def expect(self, kinds: Iterable[str]) -> None:
        """Movers of these kinds are being started, now or again."""
        until = time.monotonic() + MOVER_WAIT_S
        self._expected.update(dict.fromkeys(kinds, until))

    def _mover_kind(self, kind: str, pool: str) -> str:
        return "cuda-copy" if kind == "copy" and self._kv.pools[pool].spec.l1_device >= 0 else kind

    def _until(self, kind: str, pool: str) -> float:
        """How long a mover for a kind of job in a pool is expected where there is none; 0.0: never."""
        return self._expected.get(self._mover_kind(kind, pool), 0.0)

    def _mover(self, kind: str, pool: str) -> Session | None:
        """The least loaded mover for a kind of job in a pool."""
        kind = self._mover_kind(kind, pool)
        able = [session for session in self._movers.values() if kind in session.kinds and not session.closed]
        return min(able, key=lambda session: self._load[session.id], default=None)

    # -- sending jobs -------------------------------------------------------------------------------------------

    def _send(self, work: Work, mover: Session, now: float) -> None:
        work.mover = mover.id
        self._load[mover.id] += 1
        self.counters["jobs"] += 1
        table = self._kv.pools[work.pool].table
        n = len(work.keys)
        rows = np.maximum(table.find(work.keys), 0).astype(np.uint32)
        empty = np.zeros(n, np.uint32)
        body = Job(
            work.id,
            work.kind,
            work.pool,
            self._kv.pools[work.pool].spec.page_bytes,
            int((work.deadline - now) * 1000),
            work.src,
            work.dst,
            work.peer,
        )
        columns = (
            rows,
            work.src_slots if len(work.src_slots) else empty,
            work.dst_slots if len(work.dst_slots) else empty,
            work.places if len(work.places) else np.zeros(n, np.uint64),
            work.keys,
        )
        mover.event(Op.JOB, body, columns)

    def _demoter(self, name: str) -> Callable[[int, NDArray[np.uint32], float], int]:
        def demote(bit: int, slots: NDArray[np.uint32], now: float) -> int:
            planned = 0
            while planned < len(slots):
                mover = self._mover("copy" if bit == L1 else "store", name)
                if mover is None:
                    break
                number = next(self._numbers)
                work = self.jobs[name].demotion(number, bit, slots[planned:], now, now + DEADLINE_S)
                if work is None:
                    break
                planned += len(work.src_slots)
                self._send(work, mover, now)
            return planned

        return demote

    def _add(self, session: Session, message: Message) -> None:
        body = message.body(JobAdd)
        pool = self._kv.pool(body.pool)
        if session.read_only:
            raise Refused(f"session {session.id} is read-only", "connect without read_only")
        if body.kind not in ("fetch", "pull", "push"):
            raise BadArgument(f"job of kind {body.kind!r}", "fetch, pull or push")
        if body.tier not in (L1, L2) or not pool.table.tier(body.tier).capacity:
            raise BadArgument(f"pool {body.pool} has no {TIER_NAMES.get(body.tier, body.tier)}", "name another tier")
        if body.kind != "fetch" and pool.spec.l1_device >= 0 and not pool.spec.l2_pages:
            raise BadArgument(f"pool {body.pool} lies on a device only", "give it l2_pages: transfers go by way of L2")
        now = time.monotonic()
        if (
            body.kind != "fetch"
            and self._mover(body.kind, body.pool) is None
            and self._until(body.kind, body.pool) <= now
        ):
            raise NoMover(f"no mover for {body.kind}", "run the memory manager with a transfer process")
        if not pool.staging[L2 if pool.table.l2.capacity else L1].limit:
            raise BadArgument(f"pool {body.pool} has no staging slots", "set staging in its spec")
        keys = message.column(0, "key").copy()
        if not 1 <= len(keys) <= MAX_BATCH:
            raise BadArgument(f"{len(keys)} keys", f"1 to {MAX_BATCH}")
        if len(np.unique(keys.view("V32").ravel())) != len(keys):
            raise BadArgument("a key comes twice")
        until = deadline_of(body.timeout_ms, now)
        self.counters["fetches"] += 1
        state = np.zeros(len(keys), np.uint8)
        fetch = Fetch(session, message, body.kind, body.pool, body.peer, body.tier, keys, state, until)
        self._fetches.add(fetch, now)

    # -- from movers --------------------------------------------------------------------------------------------

    def _require_mover(self, session: Session) -> None:
        if session.role != "mover":
            raise Refused(f"session {session.id} is no mover", "say HELLO with role mover")

    def _done(self, session: Session, message: Message) -> None:
        self._require_mover(session)
        body = message.body(JobDone)
        for jobs in self.jobs.values():
            work = jobs.running.get(body.id)
            if work is not None and work.mover == session.id:
                break
        else:
            raise BadToken(f"no job {body.id} of mover session {session.id}")
        ok = message.column(0, "|u1", len(work.keys)) != 0
        places = message.column(1, "<u8", len(work.keys)) if work.kind == "store" else NO_PLACES
        if body.error:
            self.counters["jobs_failed"] += 1
            log.warning("job failed", extra={"job": work.id, "kind": work.kind, "pool": work.pool, "error": body.error})
        self._load[session.id] -= 1
        jobs.finish(work, ok, places, time.monotonic())
        session.reply(message)
        self._fetches.dirty = True

    def _cancel(self, session: Session, message: Message) -> None:
        """A client no longer wants what it asked for by `JOB_ADD` (named by its request id)."""
        number = message.body(JobCancel).id
        self._fetches.cancel(session, number)
        session.reply(message)

    def _l3_change(self, session: Session, message: Message) -> None:
        self._require_mover(session)
        body = message.body(L3Change)
        if body.what not in ("recovered", "moved", "dropped"):
            raise BadArgument(f"L3 change {body.what!r}", "recovered, moved or dropped")
        self._kv.pool(body.pool)
        keys = message.column(0, "key")
        old = message.column(1, "<u8", len(keys))
        new = message.column(2, "<u8", len(keys))
        changed = self.jobs[body.pool].change(body.what, keys, old, new)
        session.reply(message, None, (np.array([changed], np.uint64),))

    def _tier_state(self, session: Session, message: Message) -> None:
        self._require_mover(session)
        body = message.body(TierState)
        if body.tier != L3:
            raise BadArgument(f"tier {body.tier} can't be switched", "only L3 (4)")
        self._kv.pool(body.pool)
        self._switch(body.pool, body.on, body.reason)
        session.reply(message)

    def _switch(self, pool: str, on: bool, reason: str) -> None:
        jobs = self.jobs[pool]
        if jobs.l3_on and not on:
            self.counters["l3_off"] += 1
        if jobs.l3_on != on:
            log.warning("L3 switched", extra={"pool": pool, "on": on, "reason": reason})
        jobs.l3_on = on

    # -- the end of things --------------------------------------------------------------------------------------

    def closed(self, session: Session) -> Iterator[None]:
        self._fetches.forget(session)
        if self._movers.pop(session.id, None) is None:
            return
        self._load.pop(session.id, None)
        if self.is_restarted(session.pid):
            self.expect(session.kinds)
        self.counters["movers_lost"] += 1
        held: list[tuple[PoolJobs, Work]] = []
        for jobs in self.jobs.values():
            for work in [w for w in jobs.running.values() if w.mover == session.id]:
                jobs.abandon(work, time.monotonic())
                held.append((jobs, work))
                yield
        self._lost.hold(session.pid, held)
        self._fetches.dirty = True
        if "store" in session.kinds or "load" in session.kinds:
            for name, jobs in self.jobs.items():
                if self._mover("load", name) is None:
                    self._switch(name, False, "its mover ended")
                    for start in range(0, jobs.pool.table.capacity, _SLICE_ROWS):
                        jobs.forget_l3(start, _SLICE_ROWS)
                        yield

    def _freed(self) -> None:
        self._fetches.dirty = True

    def tick(self, now: float) -> float | None:
        """Deadlines of jobs and fetches, watermarks, and what could not start before."""
        times: list[float | None] = []
        for jobs in self.jobs.values():
            for work in list(jobs.running.values()):
                times.append(self._job_deadline(work, now))
        times += [self._lost.tick(now), self._fetches.tick(now)]
        times += [self._balance(name, bit, now) for name in self.jobs for bit in (L1, L2)]
        return min((due for due in times if due is not None), default=None)

    def _job_deadline(self, work: Work, now: float) -> float:
        if work.deadline > now:
            return work.deadline
        mover = self._movers.get(work.mover)
        if not work.cancelled:
            work.cancelled = True
            self.counters["jobs_cancelled"] += 1
            if mover is not None:
                mover.event(Op.JOB_CANCEL, JobCancel(work.id))
        elif now > work.deadline + GRACE_S and mover is not None:
            log.error("mover ignores a cancelled job, its session ends", extra={"job": work.id, "pid": mover.pid})
            mover.wire.shut()
            self.end_process(mover.pid)
            return now + GRACE_S
        return work.deadline + GRACE_S + 0.001 if now <= work.deadline + GRACE_S else now + GRACE_S

    def _balance(self, name: str, bit: int, now: float) -> float | None:
        """Move pages down when a tier has passed its high watermark. Returns when to come again.

        While somebody waits for pages, those that go down would be in the way: for up to `PUT_OFF_S`, from L1 only so
        many go that a batch of slots is free for others, and from L2 to the disk none, where room is made when it is
        needed.
        """
        pool = self._kv.pools[name]
        if not pool.spec.demote or pool.demoting(bit):
            return None
        over = pool.over(bit)
        if not over:
            self._over_since.pop((name, bit), None)
            return None
        put_off = min(self._fetches.busy_until(name), self._over_since.setdefault((name, bit), now) + PUT_OFF_S)
        if put_off > now:
            over = min(over, pool.short(bit, BATCH)) if bit == L1 else 0
        if over and self._mover("copy" if bit == L1 else "store", name):
            pool.lower(bit, min(over, 4 * BATCH), now)
        return put_off if put_off > now else None

    def stats(self) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {f"job_{name}": value for name, value in self.counters.items()}
        numbers["job_movers"] = len(self._movers)
        numbers["job_waiting"] = len(self._fetches)
        numbers["job_prefetches"] = self._fetches.prefetches
        for name, jobs in self.jobs.items():
            numbers[f"pool_jobs_running/{name}"] = len(jobs.running)
            numbers[f"pool_jobs_orphaned/{name}"] = len(jobs.orphaned)
            numbers[f"pool_l3_on/{name}"] = int(jobs.l3_on)
        return numbers

    def held(self, session: Session) -> dict[str, Any]:
        """`jobs`: of a mover, how many it executes."""
        return {"jobs": self._load[session.id]} if session.id in self._load else {}

    def overview(self) -> dict[str, Any]:
        """`jobs`: those under way, those of lost movers that still hold memory, and what was asked for."""
        now = time.monotonic()
        rows = [
            {
                "job": work.id,
                "kind": work.kind,
                "pool": work.pool,
                "pages": len(work.keys),
                "from": TIER_NAMES.get(work.src, ""),
                "to": TIER_NAMES.get(work.dst, ""),
                "peer": work.peer[:SHOWN_TEXT],
                "mover": work.mover,
                "lost": lost,
                "seconds_left": round(work.deadline - now, 3),
            }
            for jobs in self.jobs.values()
            for lost, works in ((False, jobs.running), (True, jobs.orphaned))
            for work in works.values()
        ]
        return {"jobs": rows[:SHOWN_ROWS], "fetches": self._fetches.overview(now)[:SHOWN_ROWS]}

    def check(self) -> list[str]:
        return [f"pool {name}: {fault}" for name, jobs in self.jobs.items() for fault in jobs.check_integrity()]
