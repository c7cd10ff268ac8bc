"""The loader of an engine: pages come from L2 without a thread that waits. A real manager and its mover."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_rig import PoolRig

from omni_flow.compute.sglang.loading import AT_ONCE, PART, Loader
from omni_flow.data.identity import PageHash
from omni_flow.data.messages import L1, L2
from omni_flow.data.posting_client import PostingClient


class Rig(PoolRig):
    """And a loader."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.posting = PostingClient(self.path, name="loader")
        self.loader = Loader(self.posting, "kv")

    def back(self) -> list[tuple[str, bool]]:
        """What comes back next, woken by the descriptor."""
        poll = select.poll()
        poll.register(self.loader.fileno(), select.POLLIN)
        while not (came := self.loader.ready()):
            assert poll.poll(20_000)
        return came

    def all_back(self) -> list[tuple[str, bool]]:
        """Whatever comes back, until nothing waits."""
        came: list[tuple[str, bool]] = []
        while self.loader.waiting:
            came += self.back()
        return came

    def close(self) -> None:
        self.posting.close()
        super().close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_pages_of_l2_are_in_l1_when_their_request_comes_back(rig: Rig) -> None:
    keys = rig.in_l2(50)
    rig.loader.order("a", keys)
    assert rig.loader.waiting == 1
    assert rig.back() == [("a", True)]
    assert all(tier & L1 for tier in rig.client.probe("kv", keys).tolist())
    assert (rig.loader.waiting, rig.loader.loaded_pages) == (0, 50)


def test_who_waits_is_told_of_the_pages_that_are_there_while_others_come(rig: Rig) -> None:
    told: list[int] = []
    with rig.mover_stopped():
        rig.loader.order("a", [*rig.pages(PART, L1), *rig.pages(10, L2)], told.append)
        assert select.select([rig.loader], [], [], 20)[0]
        assert rig.loader.ready() == []
        assert told == [PART]
        assert rig.loader.ready() == []
    assert rig.back() == [("a", True)]
    assert told == [PART]


def test_a_request_whose_pages_are_nowhere_comes_back_without_them(rig: Rig) -> None:
    rig.loader.order("a", [*rig.in_l2(3), PageHash(bytes(32))])
    assert rig.back() == [("a", False)]
    assert rig.loader.loaded_pages == 3


def test_more_requests_than_are_fetched_at_once_come_back_in_their_order(rig: Rig) -> None:
    with rig.mover_stopped():
        for name in "abcde":
            rig.loader.order(name, rig.in_l2(10))
        fetches = rig.client.overview()["fetches"]
        assert [row["pages"] for row in fetches] == [10] * AT_ONCE
        assert rig.loader.ready() == []
    assert rig.all_back() == [(name, True) for name in "abcde"]


def test_nothing_is_brought_for_a_request_that_was_cancelled_while_it_waited_for_its_turn(rig: Rig) -> None:
    cancelled = rig.in_l2(10)
    with rig.mover_stopped():
        for name in "ab":
            rig.loader.order(name, rig.in_l2(10))
        rig.loader.order("c", cancelled, wanted=lambda: False)
        rig.loader.order("d", rig.in_l2(10))
        assert rig.loader.waiting == 3
    assert rig.all_back() == [(name, True) for name in "abd"]
    assert not any(tier & L1 for tier in rig.client.probe("kv", cancelled).tolist())


def test_a_fetch_that_takes_too_long_gives_its_request_back(rig: Rig) -> None:
    loader = rig.loader = Loader(rig.posting, "kv", timeout=0.2)
    with rig.mover_stopped():
        loader.order("a", rig.in_l2(10))
        assert rig.back() == [("a", False)]


def test_all_requests_come_back_when_the_manager_has_gone(rig: Rig) -> None:
    with rig.mover_stopped():
        for name in "abc":
            rig.loader.order(name, rig.in_l2(10))
        rig.manager.kill()
    assert rig.all_back() == [(name, False) for name in "abc"]
    assert not rig.loader.hear()
