"""The engine's book of pages and its sources: random operations against the invariants."""

from __future__ import annotations

import random

import pytest

from omni_flow.compute.errors import ComputeError
from omni_flow.compute.sglang.lookahead import Lookahead
from omni_flow.compute.sglang.pages import LOT, Node, PageBook, Part
from omni_flow.compute.sglang.pagesource import LocalPages
from omni_flow.data.identity import PageHash


def key(*path: int) -> PageHash:
    return PageHash(bytes(path).ljust(32, b"\0"))


def keys_of(tokens: list[int]) -> list[PageHash]:
    return [key(*tokens[: at + 1]) for at in range(len(tokens))]


class Running:
    """A request: pages of `tokens` in order, one page a token."""

    def __init__(self, book: PageBook, tokens: list[int]) -> None:
        self.tokens = tokens
        self.node: Node = book.match(keys_of(tokens)[:-1])
        book.lock(self.node)
        self.own: list[int] = []


def test_random_requests_keep_the_equation_and_end_with_nothing_held() -> None:
    rng = random.Random(1)
    for _ in range(60):
        book = PageBook(LocalPages(40))
        running: list[Running] = []
        for _ in range(150):
            action = rng.choice(("start", "write", "seal", "end", "drop", "evict"))
            if action == "start":
                running.append(Running(book, [rng.randrange(1, 3) for _ in range(rng.randrange(1, 12))]))
            elif action == "evict":
                book.evict(rng.randrange(5))
            elif running:
                one = rng.choice(running)
                missing = len(one.tokens) - one.node.depth - len(one.own)
                if action == "write" and missing:
                    if book.available < missing:
                        book.evict(missing - book.available)
                    if book.available >= missing:
                        one.own += book.take(missing)
                elif action in ("seal", "end") and not missing:
                    sealed = book.seal(Part(one.node, keys_of(one.tokens)[one.node.depth :], one.own))()[0]
                    assert sealed.node.depth == len(one.tokens)
                    assert not one.own
                    book.lock(sealed.node)
                    book.unlock(one.node)
                    one.node = sealed.node
                if action in ("end", "drop"):
                    book.give(one.own)
                    book.unlock(one.node)
                    running.remove(one)
            assert book.check() == []
        for one in running:
            book.give(one.own)
            book.unlock(one.node)
        assert book.held == book.locked == 0
        book.reset()
        assert book.available == 40
        assert sorted(book.take(40)) == list(range(1, 41))


def test_a_page_that_was_sealed_before_replaces_the_own_copy() -> None:
    book = PageBook(LocalPages(10))
    first, second = Running(book, [1, 2, 3]), Running(book, [1, 2, 4])
    first.own, second.own = book.take(3), book.take(3)
    theirs = list(first.own)
    book.seal(Part(first.node, keys_of(first.tokens), first.own))()
    (sealed,) = book.seal(Part(second.node, keys_of(second.tokens), second.own))()
    assert sealed.replaced == [(0, theirs[0]), (1, theirs[1])]
    assert sealed.node.chain()[:2] == theirs[:2]
    assert book.held == 0
    assert book.pinned == 4


def test_taking_beyond_the_quota_is_refused_with_numbers() -> None:
    book = PageBook(LocalPages(5))
    book.take(3)
    with pytest.raises(ComputeError, match="3 pages wanted, 2 of 5 available"):
        book.take(3)


def test_pages_go_to_others_only_when_the_device_has_passed_and_come_back_if_needed_before() -> None:
    passed = False
    source = LocalPages(4 * LOT)
    book = PageBook(source, fence=lambda: lambda: passed)
    pages = book.take(4 * LOT)
    book.give(pages)
    assert book.leased == 4 * LOT
    again = book.take(4 * LOT)
    assert sorted(again) == sorted(pages)
    book.give(again)
    assert book.leased == 4 * LOT
    passed = True
    book.give([])
    assert book.leased == LOT
    assert book.available == 4 * LOT


def test_evicted_pages_stay_in_the_source_until_others_need_the_room() -> None:
    source = LocalPages(4)
    book = PageBook(source)
    one = Running(book, [1, 2])
    one.own = book.take(2)
    node = book.seal(Part(one.node, keys_of([1, 2]), one.own))()[0].node
    chain = node.chain()
    assert book.evict(9) == 2
    assert book.match(keys_of([1, 2])).chain() == chain
    book.evict(2)
    book.take(4)
    assert book.match(keys_of([1, 2])).depth == 0


def test_a_hit_takes_the_room_of_idle_pins_and_never_of_its_own_chain() -> None:
    source = LocalPages(20)
    source.quota = 8  # the pool is larger than what this engine may hold
    book = PageBook(source)

    def computed(tokens: list[int]) -> list[int]:
        one = Running(book, tokens)
        missing = len(tokens) - one.node.depth
        if book.available < missing:
            book.evict(missing - book.available)
        one.own = book.take(missing)
        sealed = book.seal(Part(one.node, keys_of(tokens)[one.node.depth :], one.own))()[0]
        book.unlock(one.node)
        return sealed.node.chain()

    first = computed([1, 1, 1, 1])
    book.evict(2)
    computed([2, 2, 2, 2, 2])
    assert book.available < 2
    assert book.match(keys_of([1, 1, 1, 1])).chain() == first
    assert book.check() == []


def test_pages_that_are_leased_ahead_never_stand_in_the_way_of_a_hit() -> None:
    source = LocalPages(3 * LOT)
    source.quota = LOT
    book, other = PageBook(source), PageBook(source)
    for tokens in ([1, 1, 1], [2, 2]):
        one = Running(other, tokens)
        one.own = other.take(len(tokens))
        other.unlock(other.seal(Part(one.node, keys_of(tokens), one.own))()[0].node)
    book.give(book.take(LOT))
    assert book.leased == LOT
    assert book.match(keys_of([1, 1, 1])).depth == 3
    assert book.leased == LOT - 3
    assert book.match(keys_of([2, 2])).depth == 2
    assert book.pinned == 5
    assert book.check() == []


@pytest.mark.parametrize("probed", ["by the look-ahead", "otherwise"])
def test_what_was_absent_is_found_when_it_is_asked_for_again_before_a_batch_was_formed(probed: str) -> None:
    source = LocalPages(8)
    book = PageBook(source)
    ahead = Lookahead(book, lambda request: request)
    keys = keys_of([1, 2, 3, 4])

    def ask() -> None:
        if probed == "otherwise":
            ahead.learn(keys, source.absent(keys)(), 5)
        else:
            ahead.ask([keys], 5)

    ask()
    ahead.ask([keys], 5)
    assert book.match(keys, ahead.absent([keys, keys], 5)).depth == 0
    ahead.ask([keys], 5)  # answered late
    source.seal(source.take(4, 4), keys)()  # by another engine
    ask()
    assert book.match(keys, ahead.absent([keys, keys], 5)).depth == 4


def test_what_was_probed_otherwise_is_absent_for_that_batch_alone_and_until_pages_come() -> None:
    ahead = Lookahead(PageBook(LocalPages(8)), lambda request: request)
    one, other = keys_of([1]), keys_of([2])
    ahead.learn([*one, *other], {*one}, 5)
    assert ahead.absent([one], 5) == {*one}
    assert ahead.absent([one], 6) == set()
    ahead.learn(one, {*one}, 6)
    ahead.forget()
    assert ahead.absent([one], 6) == set()


def test_room_is_made_by_the_lease_where_it_suffices_else_by_idle_pins_on_other_pages() -> None:
    book = PageBook(LocalPages(2 * LOT))
    for tokens in ([7] * 20, [8] * 80):
        one = Running(book, tokens)
        one.own = book.take(len(tokens))
        kept = book.seal(Part(one.node, keys_of(tokens), one.own))()[0].node
    leased = 2 * LOT - 100
    assert (book.idle, book.available, book.leased) == (100, leased, leased)
    book.make_room(10, kept)
    assert (book.idle, book.leased) == (100, leased - 10)
    book.make_room(30, kept)
    assert (book.idle, book.leased) == (80, leased - 10)
    book.make_room(200, kept)
    assert (book.idle, book.leased) == (80, 0)
    assert book.check() == []
