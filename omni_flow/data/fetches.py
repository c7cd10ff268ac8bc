"""Requests for pages to be brought somewhere: planned in batches as staging room and movers allow."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import DataError, JobFailed, NoMover
from omni_flow.data.jobs import BATCH, Done, PoolJobs, Work
from omni_flow.data.kv_service import KvService
from omni_flow.data.messages import L1, L2, L3, SHOWN_TEXT, TIER_NAMES
from omni_flow.data.protocol import Message
from omni_flow.data.session import Session

U8 = NDArray[np.uint8]
Plan = Callable[[int, U8, float, float, Done], tuple[Work | None, int]]
WAITING: Final = 0
MOVING: Final = 1
ARRIVED: Final = 2
FAILED: Final = 3
PREFETCH_S: Final = 30.0
CALM_S: Final = 0.05
"""After pages have come, who asked for them has the manager and the disk to itself for so long."""
NEVER: Final = float("inf")


@dataclass(slots=True, eq=False)
class Fetch:
    """Keys on their way; answered when each has arrived or failed. `message` is None for a prefetch.

    Args:
        state: per key WAITING (nothing planned), MOVING (in a job), ARRIVED or FAILED.
        staged: per key whether it is or was loaded from L3 into L2, on its way to where it is wanted.
    """

    session: Session
    message: Message | None
    kind: str
    pool: str
    peer: str
    tier: int
    keys: U8
    state: U8
    deadline: float
    running: int = 0
    over: bool = False
    staged: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.staged = np.zeros(len(self.keys), np.bool_)

    @property
    def passes(self) -> bool:
        """Whether what comes from L3 leaves L2 again."""
        return self.kind == "fetch" and self.tier == L1

    @property
    def passing(self) -> int:
        """Keys on their way from L3 into L2, or from there on."""
        return int(np.count_nonzero(self.staged & ((self.state == MOVING) | (self.state == WAITING))))

    @property
    def waiting(self) -> int:
        """Keys for which nothing has been done."""
        return int(np.count_nonzero((self.state == WAITING) & ~self.staged))


class Fetches:
    """All fetches, pulls, pushes and prefetches under way.

    Args:
        mover: the mover for a kind of job in a pool, None if there is none.
        expected: until when one may come where there is none, 0.0: it never will.
        send: hands a planned job to a mover.
        prefetch_bytes: bound on what prefetches may have under way.
    """

    def __init__(
        self,
        kv: KvService,
        jobs: Mapping[str, PoolJobs],
        mover: Callable[[str, str], Session | None],
        expected: Callable[[str, str], float],
        send: Callable[[Work, Session, float], None],
        numbers: Iterator[int],
        prefetch_bytes: int,
    ) -> None:
        self._pools = kv.pools
        self.jobs = jobs
        self._mover = mover
        self._expected = expected
        self._send = send
        self._numbers = numbers
        self.prefetch_bytes = prefetch_bytes
        self.fetches: list[Fetch] = []
        self.dirty = False
        self._again = NEVER
        self._calm: dict[str, float] = {}
        self.prefetches = 0

    def __len__(self) -> int:
        return len(self.fetches)

    def add(self, fetch: Fetch, now: float) -> None:
        """Begin. Who asks uses the pages that are there: it may have probed for them, which touches nothing."""
        if fetch.message is not None:
            self._pools[fetch.pool].touch(fetch.keys, fetch.tier if fetch.kind == "fetch" else L2)
        self.fetches.append(fetch)
        self._advance(fetch, now)

    def busy_until(self, pool: str) -> float:
        """Until when what can wait should, for the sake of those who wait for pages of this pool, or just have."""
        if any(fetch.pool == pool and fetch.message is not None and not fetch.over for fetch in self.fetches):
            return NEVER
        return self._calm.get(pool, 0.0)

    def overview(self, now: float) -> list[dict[str, Any]]:
        """What was asked for and has not ended, for people."""
        return [
            {
                "session": fetch.session.id,
                "kind": fetch.kind if fetch.message is not None else "prefetch",
                "pool": fetch.pool,
                "to": fetch.peer[:SHOWN_TEXT] if fetch.kind == "push" else TIER_NAMES[fetch.tier],
                "pages": len(fetch.keys),
                "arrived": int(np.count_nonzero(fetch.state == ARRIVED)),
                "moving": int(np.count_nonzero(fetch.state == MOVING)),
                "seconds_left": round(fetch.deadline - now, 3),
            }
            for fetch in self.fetches
            if not fetch.over
        ]

    def cancel(self, session: Session, request: int) -> None:
        """Answer a request of this session early; jobs under way finish by themselves."""
        for fetch in self.fetches:
            if fetch.session is session and fetch.message is not None and fetch.message.request == request:
                self._end(fetch, JobFailed("cancelled by its client"))

    def forget(self, session: Session) -> None:
        """The session has ended."""
        for fetch in self.fetches:
            if fetch.session is session:
                fetch.over = True

    def tick(self, now: float) -> float | None:
        """Go on with what could not start before, end what is past its deadline. Returns when to come again."""
        if not self.fetches:
            return None
        if self.dirty or self._again <= now or any(fetch.deadline <= now or fetch.over for fetch in self.fetches):
            self.dirty, self._again = False, NEVER
            for fetch in self.fetches:
                if fetch.deadline <= now and not fetch.over:
                    self._end(fetch, JobFailed(f"{fetch.kind} of {len(fetch.keys)} pages not done in time"))
            for fetch in self.fetches:
                self._advance(fetch, now)
            self.fetches = [fetch for fetch in self.fetches if not fetch.over]
        if self.dirty:
            return now
        return min(self._again, *(fetch.deadline for fetch in self.fetches)) if self.fetches else None

    def prefetch(self, session: Session, pool: str, keys: U8) -> None:
        """Start bringing keys that are in L3 only into L2, within the byte budget; nobody waits for it."""
        under = sum(len(f.keys) * self._pools[f.pool].spec.page_bytes for f in self.fetches if f.message is None)
        room = (self.prefetch_bytes - under) // self._pools[pool].spec.page_bytes
        if room <= 0 or self._mover("load", pool) is None:
            return
        distinct = np.unique(keys[:room].view("V32").ravel(), return_index=True)[1]
        chosen = keys[np.sort(distinct)].copy()
        now = time.monotonic()
        fetch = Fetch(session, None, "fetch", pool, "", L2, chosen, np.zeros(len(chosen), np.uint8), now + PREFETCH_S)
        self.prefetches += 1
        self.add(fetch, now)

    def _advance(self, fetch: Fetch, now: float) -> None:
        """Start what can be started; answer when nothing is left."""
        if fetch.over:
            return
        try:
            if fetch.kind == "fetch":
                self._advance_fetch(fetch, now)
            else:
                self._advance_peer(fetch, now)
        except DataError as error:
            self._end(fetch, error)
            return
        if not fetch.running and not (fetch.state == WAITING).any():
            self._end(fetch, None)

    def _classify(self, fetch: Fetch) -> tuple[NDArray[np.int64], U8]:
        waiting = np.flatnonzero(fetch.state == WAITING)
        return waiting, self._tiers(fetch, waiting)

    def _tiers(self, fetch: Fetch, at: NDArray[np.int64]) -> U8:
        """The tiers that have the keys at positions `at` now, as bits."""
        table = self._pools[fetch.pool].table
        rows = table.find(fetch.keys[at])
        tiers = table.tiers[rows]
        tiers[rows < 0] = 0
        return tiers

    def _advance_fetch(self, fetch: Fetch, now: float) -> None:
        waiting, tiers = self._classify(fetch)
        there = (tiers & fetch.tier) != 0
        fetch.state[waiting[there]] = ARRIVED
        fetch.state[waiting[tiers == 0]] = FAILED
        other = L1 if fetch.tier == L2 else L2
        self._copy(fetch, waiting[~there & ((tiers & other) != 0)], other, fetch.tier, now)
        self._load(fetch, waiting[tiers == L3], now)

    def _copy(self, fetch: Fetch, at: NDArray[np.int64], src: int, dst: int, now: float) -> None:
        self._run(fetch, at, src, "copy", functools.partial(self.jobs[fetch.pool].copy, src, dst), now)

    def _load(self, fetch: Fetch, at: NDArray[np.int64], now: float) -> None:
        def plan(*job: Any) -> tuple[Work | None, int]:
            passing = sum(other.passing for other in self._through(fetch.pool)) if fetch.passes else 0
            return self.jobs[fetch.pool].load(passing, *job)

        fetch.staged[at] = False  # one that had come may have gone again
        self._run(fetch, at, L3, "load", plan, now)

    def _through(self, pool: str) -> Iterator[Fetch]:
        """Those whose pages pass L2. An engine asks for the pages of one prompt by several."""
        return (fetch for fetch in self.fetches if fetch.pool == pool and fetch.passes and not fetch.over)

    def _run(self, fetch: Fetch, at: NDArray[np.int64], src: int, kind: str, plan: Plan, now: float) -> None:
        """Plan jobs for the keys at positions `at`, all in tier `src` (0: at a peer), as far as staging and movers go.

        The room for one job may have been that of pages that a later one was to read: those are looked for anew.
        """
        while len(at):
            mover = self._mover(kind, fetch.pool)
            if mover is None:
                until = self._expected(kind, fetch.pool)
                if until <= now:
                    raise NoMover(f"no mover for {kind}", "run the memory manager with its movers")
                self._again = min(self._again, until)
                return
            batch, at = at[:BATCH], at[BATCH:]
            if src:
                there = (self._tiers(fetch, batch) & src) != 0
                self.dirty |= not there.all()
                batch = batch[there]
            if not len(batch):
                continue
            work, taken = plan(next(self._numbers), fetch.keys[batch], now, fetch.deadline, self._arrival(fetch, batch))
            if work is None:
                return
            fetch.state[batch[:taken]] = MOVING
            fetch.staged[batch[:taken]] |= kind == "load"
            fetch.running += 1
            at = np.concatenate((batch[taken:], at))
            self._send(work, mover, now)

    def _arrival(self, fetch: Fetch, batch: NDArray[np.int64]) -> Done:
        def done(work: Work, ok: U8) -> None:
            fetch.running -= 1
            mine = batch[: len(work.keys)]
            final = work.dst == fetch.tier if fetch.kind == "fetch" else work.kind == fetch.kind
            fetch.state[mine] = np.where(ok, ARRIVED if final else WAITING, FAILED)
            if final and fetch.passes:
                passed = fetch.keys[mine[fetch.staged[mine] & (ok != 0)]]
                self.jobs[fetch.pool].let_through(passed, sum(other.waiting for other in self._through(fetch.pool)))
            self.dirty = True

        return done

    def _advance_peer(self, fetch: Fetch, now: float) -> None:
        waiting, tiers = self._classify(fetch)
        jobs = self.jobs[fetch.pool]
        if fetch.kind == "pull":
            fetch.state[waiting[(tiers & (L1 | L2)) != 0]] = ARRIVED
            at = waiting[(tiers & (L1 | L2)) == 0]
            self._run(fetch, at, 0, "pull", functools.partial(jobs.pull, fetch.peer), now)
            return
        fetch.state[waiting[tiers == 0]] = FAILED
        below, above = waiting[(tiers & L2) != 0], waiting[(tiers & (L1 | L2)) == L1]
        self._run(fetch, below, L2, "push", functools.partial(jobs.push, fetch.peer, L2), now)
        if self._pools[fetch.pool].spec.l1_device >= 0:
            self._copy(fetch, above, L1, L2, now)
        else:
            self._run(fetch, above, L1, "push", functools.partial(jobs.push, fetch.peer, L1), now)
        self._load(fetch, waiting[tiers == L3], now)

    def _end(self, fetch: Fetch, error: DataError | None) -> None:
        fetch.over = True
        if fetch.message is None:
            return
        self._calm[fetch.pool] = time.monotonic() + CALM_S
        if error is not None:
            fetch.session.fail(fetch.message, error)
        else:
            fetch.session.reply(fetch.message, None, ((fetch.state == ARRIVED).astype(np.uint8),))
