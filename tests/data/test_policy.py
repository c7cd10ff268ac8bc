"""Eviction policies against naive oracles, and the claim S3-FIFO is chosen for."""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_flow.data.policy import EvictionPolicy, KeepHints, Lru, PolicyError, S3Fifo, make_policy
from omni_flow.data.policy.ghost import Ghost

CAPACITY = 24


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


def keys(numbers: list[int]) -> np.ndarray:
    return np.array([(n * 0x9E3779B97F4A7C15) % (1 << 64) for n in numbers], np.uint64)


def anything(candidates: np.ndarray) -> np.ndarray:
    return np.ones(len(candidates), np.bool_)


class NaiveLru:
    def __init__(self) -> None:
        self.order: OrderedDict[int, int] = OrderedDict()

    def insert(self, page: int, key: int) -> None:
        self.order[page] = key

    def hit(self, batch: list[int]) -> None:
        for page in batch:
            self.order.move_to_end(page)

    def remove(self, batch: list[int], evicted: bool) -> None:
        for page in batch:
            del self.order[page]

    def victims(self, n: int, may_go: Callable[[int], bool]) -> list[int]:
        return [page for page in self.order if may_go(page)][:n]


class NaiveS3Fifo:
    """The algorithm of the paper a page at a time, over plain lists."""

    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.uses: dict[int, int] = {}
        self.tag: dict[int, int] = {}
        self.ghost = Ghost(CAPACITY - int(CAPACITY * 0.1))

    def insert(self, page: int, key: int) -> None:
        self.tag[page] = int(keys([key])[0]) >> 32
        known = bool(self.ghost.contains(np.array([self.tag[page]], np.uint32))[0])
        (self.main if known else self.small).append(page)
        self.uses[page] = 0

    def hit(self, batch: list[int]) -> None:
        for page in set(batch):
            self.uses[page] = min(self.uses[page] + 1, 3)

    def remove(self, batch: list[int], evicted: bool) -> None:
        gone = [page for page in batch if page in self.small]
        if evicted and gone:
            self.ghost.add(np.array([self.tag[page] for page in gone], np.uint32))
        self.small = [page for page in self.small if page not in batch]
        self.main = [page for page in self.main if page not in batch]
        for page in batch:
            del self.uses[page]

    def victims(self, n: int, may_go: Callable[[int], bool]) -> list[int]:
        chosen: list[int] = []
        excess = len(self.small) - int((len(self.small) + len(self.main)) * 0.1)
        self._small(n, max(excess, 0), may_go, chosen)
        self._main(n, may_go, chosen)
        self._small(n, len(self.small), may_go, chosen)
        self._main(n, may_go, chosen)
        return chosen

    def _main(self, n: int, may_go: Callable[[int], bool], chosen: list[int]) -> None:
        turns = 0
        while len(chosen) < n and turns < 4:
            turns += 1
            for page in list(self.main):
                if len(chosen) == n or page in chosen or not may_go(page):
                    continue
                if self.uses[page]:
                    self.uses[page] -= 1
                    self.main.remove(page)
                    self.main.append(page)
                else:
                    chosen.append(page)

    def _small(self, n: int, departures: int, may_go: Callable[[int], bool], chosen: list[int]) -> None:
        for page in list(self.small):
            if len(chosen) == n or departures == 0 or page in chosen or not may_go(page):
                continue
            departures -= 1
            if self.uses[page] >= 2:
                self.small.remove(page)
                self.main.append(page)
            else:
                chosen.append(page)


class PolicyAgainstOracle(RuleBasedStateMachine):
    def make(self) -> tuple[EvictionPolicy, NaiveLru | NaiveS3Fifo]:
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.policy, self.oracle = self.make()
        self.tracked: set[int] = set()

    @rule(batch=st.lists(st.tuples(st.integers(0, CAPACITY - 1), st.integers(0, 60)), unique_by=lambda t: t[0]))
    def insert(self, batch: list[tuple[int, int]]) -> None:
        batch = [(page, key) for page, key in batch if page not in self.tracked]
        self.policy.on_insert(pages(*(p for p, _ in batch)), keys([k for _, k in batch]))
        # Membership of the ghost is read before the batch changes anything, which one by one it is as well.
        for page, key in batch:
            self.oracle.insert(page, key)
            self.tracked.add(page)

    @precondition(lambda self: self.tracked)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        batch = data.draw(st.lists(st.sampled_from(sorted(self.tracked)), max_size=8))
        self.policy.on_hit(pages(*batch))
        self.oracle.hit(batch)

    @precondition(lambda self: self.tracked)
    @rule(data=st.data(), evicted=st.booleans())
    def remove(self, data: st.DataObject, evicted: bool) -> None:
        batch = data.draw(st.lists(st.sampled_from(sorted(self.tracked)), max_size=4, unique=True))
        self._remove(batch, evicted)

    @rule(n=st.integers(0, CAPACITY), stuck=st.sets(st.integers(0, CAPACITY - 1), max_size=8), gone=st.integers(0, 30))
    def evict(self, n: int, stuck: set[int], gone: int) -> None:
        def evictable(candidates: np.ndarray) -> np.ndarray:
            return ~np.isin(candidates, list(stuck))

        got = self.policy.victims(n, evictable).tolist()
        assert got == self.oracle.victims(n, lambda page: page not in stuck)
        assert len(got) == min(n, len(self.tracked - stuck))
        self._remove(got[:gone], True)

    def _remove(self, batch: list[int], evicted: bool) -> None:
        self.policy.on_remove(pages(*batch), evicted=evicted)
        self.oracle.remove(batch, evicted)
        self.tracked -= set(batch)

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        self.policy.check_integrity()
        assert len(self.policy) == len(self.tracked)
        every = np.arange(CAPACITY, dtype=np.uint32)
        assert set(np.flatnonzero(self.policy.tracks(every)).tolist()) == self.tracked


class LruMachine(PolicyAgainstOracle):
    def make(self) -> tuple[EvictionPolicy, NaiveLru | NaiveS3Fifo]:
        return Lru(CAPACITY), NaiveLru()


class S3FifoMachine(PolicyAgainstOracle):
    def make(self) -> tuple[EvictionPolicy, NaiveLru | NaiveS3Fifo]:
        return S3Fifo(CAPACITY), NaiveS3Fifo()


class UnhintedMachine(PolicyAgainstOracle):
    def make(self) -> tuple[EvictionPolicy, NaiveLru | NaiveS3Fifo]:
        policy = KeepHints(S3Fifo(CAPACITY))
        return policy, NaiveS3Fifo()


for machine in (LruMachine, S3FifoMachine, UnhintedMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLruEqualsItsOracle = LruMachine.TestCase
TestS3FifoEqualsItsOracle = S3FifoMachine.TestCase
TestHintsThatNobodyGaveChangeNothing = UnhintedMachine.TestCase


def hit_ratio(policy: EvictionPolicy, trace: np.ndarray, capacity: int) -> float:
    """A cache of `capacity` pages in front of `trace`, evicting one page a miss."""
    place: dict[int, int] = {}
    holder = np.full(capacity, -1)
    free, hits = list(range(capacity)), 0
    for item in trace.tolist():
        if item in place:
            hits += 1
            policy.on_hit(pages(place[item]))
            continue
        if not free:
            (victim,) = policy.victims(1, anything).tolist()
            policy.on_remove(pages(victim), evicted=True)
            del place[int(holder[victim])]
            free.append(victim)
        page = free.pop()
        place[item], holder[page] = page, item
        policy.on_insert(pages(page), keys([item]))
    return hits / len(trace)


def test_s3_fifo_keeps_more_hits_than_lru_when_long_scans_pass_through_skewed_traffic() -> None:
    rng = np.random.default_rng(1)
    parts = []
    for block in range(12):
        parts.append(rng.zipf(1.2, 600) % 3000)
        parts.append(np.arange(300) + 10_000 + block * 300)
    trace = np.concatenate(parts)
    lru, s3 = hit_ratio(Lru(200), trace, 200), hit_ratio(S3Fifo(200), trace, 200)
    assert s3 > lru


def test_s3_fifo_is_no_worse_than_lru_on_skewed_traffic_without_scans() -> None:
    trace = np.random.default_rng(2).zipf(1.2, 8000) % 5000
    assert hit_ratio(S3Fifo(200), trace, 200) >= hit_ratio(Lru(200), trace, 200)


def test_a_scan_leaves_the_main_queue_of_s3_fifo_alone() -> None:
    policy = S3Fifo(10)
    policy.on_insert(pages(0, 1, 2), keys([0, 1, 2]))
    policy.on_hit(pages(0, 1, 2))
    policy.on_hit(pages(0, 1, 2))
    for item in range(100, 140):
        page = 3 + item % 7
        if policy.tracks(pages(page))[0]:
            policy.on_remove(policy.victims(1, anything), evicted=True)
        free = [p for p in range(3, 10) if not policy.tracks(pages(p))[0]]
        policy.on_insert(pages(free[0]), keys([item]))
    assert policy.tracks(pages(0, 1, 2)).all()


def test_a_page_that_comes_back_while_the_ghost_knows_it_outlives_new_pages() -> None:
    policy = S3Fifo(10)
    policy.on_insert(pages(0), keys([77]))
    policy.on_remove(pages(0), evicted=True)
    policy.on_insert(pages(0, 1, 2), keys([77, 1, 2]))
    assert policy.victims(2, anything).tolist() == [1, 2]


@pytest.mark.parametrize("name", ["lru", "s3fifo"])
def test_every_page_is_to_be_had_however_much_all_were_used(name: str) -> None:
    policy = make_policy(name, 100)
    policy.on_insert(np.arange(100, dtype=np.uint32), keys(list(range(100))))
    for _ in range(3):
        policy.on_hit(np.arange(100, dtype=np.uint32))
    assert sorted(policy.victims(100, anything).tolist()) == list(range(100))


def test_who_wants_no_victims_changes_nothing() -> None:
    policy, other = S3Fifo(10), S3Fifo(10)
    for one in (policy, other):
        one.on_insert(pages(1, 0), keys([1, 0]))
        one.on_hit(pages(0, 1))
        one.on_hit(pages(0, 1))
    assert not len(policy.victims(0, lambda candidates: candidates != 1))
    assert policy.victims(1, anything).tolist() == other.victims(1, anything).tolist() == [1]


def test_a_void_page_leaves_no_ghost() -> None:
    policy = S3Fifo(10)
    policy.on_insert(pages(0), keys([77]))
    policy.on_remove(pages(0), evicted=False)
    policy.on_insert(pages(0, 1, 2), keys([77, 1, 2]))
    assert policy.victims(2, anything).tolist() == [0, 1]


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=20), st.integers(1, 30))
def test_the_ghost_never_knows_a_tag_that_was_not_added_lately(batches: list[list[int]], capacity: int) -> None:
    ghost = Ghost(capacity)
    added: list[int] = []
    for batch in batches:
        ghost.add(np.array(batch, np.uint32))
        added += batch
        known = ghost.contains(np.arange(41, dtype=np.uint32))
        assert set(np.flatnonzero(known).tolist()) <= set(added[-capacity - 1 :])
        if batch:
            assert known[batch[-1]]


def test_the_ghost_remembers_nearly_all_of_its_capacity() -> None:
    ghost = Ghost(10_000)
    tags = np.random.default_rng(3).integers(1, 1 << 32, 50_000).astype(np.uint32)
    ghost.add(tags)
    assert ghost.contains(tags[-10_000:]).mean() > 0.9
    assert ghost.contains(tags[:39_000]).mean() < 0.001


def test_kept_pages_go_after_all_others_and_lower_levels_before_higher() -> None:
    policy = KeepHints(Lru(8))
    policy.on_insert(pages(0, 1, 2, 3), keys([0, 1, 2, 3]))
    policy.keep(pages(0), 2, until=100)
    policy.keep(pages(1), 1, until=100)
    assert policy.victims(4, anything, now=5).tolist() == [2, 3, 1, 0]


def test_a_hint_ends_at_its_deadline() -> None:
    policy = KeepHints(Lru(8))
    policy.on_insert(pages(0, 1), keys([0, 1]))
    policy.keep(pages(0), 3, until=100)
    assert policy.victims(1, anything, now=99.5).tolist() == [1]
    assert policy.victims(1, anything, now=100).tolist() == [0]


def test_a_hint_does_not_pass_to_the_next_holder_of_the_page() -> None:
    policy = KeepHints(Lru(8))
    policy.on_insert(pages(0, 1), keys([0, 1]))
    policy.keep(pages(0), 3, until=100)
    policy.on_remove(pages(0), evicted=True)
    policy.on_remove(pages(1), evicted=True)
    policy.on_insert(pages(0, 1), keys([5, 6]))
    assert policy.victims(1, anything).tolist() == [0]
    policy.check_integrity()


@pytest.mark.parametrize("name", ["s3fifo", "lru"])
def test_contradicting_calls_are_refused_and_change_nothing(name: str) -> None:
    policy = make_policy(name, 8)
    policy.on_insert(pages(0, 1), keys([0, 1]))
    for call in (
        lambda: policy.on_insert(pages(2, 1), keys([2, 1])),
        lambda: policy.on_insert(pages(2, 2), keys([2, 2])),
        lambda: policy.on_insert(pages(8), keys([8])),
        lambda: policy.on_hit(pages(0, 5)),
        lambda: policy.on_remove(pages(0, 5), evicted=True),
        lambda: policy.on_remove(pages(0, 0), evicted=True),
    ):
        with pytest.raises(PolicyError):
            call()
        policy.check_integrity()
        assert len(policy) == 2


def test_an_unknown_policy_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(PolicyError, match="lru, s3fifo"):
        make_policy("arc", 8)


@pytest.mark.parametrize(("name", "limit"), [("s3fifo", 24), ("lru", 12)])
def test_memory_a_page_is_bounded_while_a_full_pool_turns_over(name: str, limit: int) -> None:
    capacity = 1 << 16
    policy = make_policy(name, capacity)
    policy.on_insert(np.arange(capacity, dtype=np.uint32), np.arange(capacity, dtype=np.uint64) << np.uint64(32))
    rng = np.random.default_rng(4)
    for turn in range(40):
        policy.on_hit(rng.integers(0, capacity, 4096).astype(np.uint32))
        gone = policy.victims(4096, anything)
        policy.on_remove(gone, evicted=True)
        fresh = np.arange(len(gone), dtype=np.uint64) + np.uint64(capacity * (turn + 2))
        policy.on_insert(gone, fresh << np.uint64(32))
        assert policy.nbytes() <= limit * capacity
    policy.check_integrity()
