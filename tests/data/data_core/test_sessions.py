"""Pages of sessions: which are kept is pure, the rest with real managers, movers and clients that are killed."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import BadArgument, Refused
from omni_flow.data.kv_client import Request, commit_request, end_session_request, keep_session_request
from omni_flow.data.messages import L1, L2, PoolName
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.posting_client import PostingClient
from omni_flow.data.protocol import Op
from omni_flow.data.session_leases import Change, SessionLeases

from .conftest import Make, Puppet, keys, store
from .movers_rig import PAGE, wait_for_mover

A, B, C, D = (bytes([n]) * 32 for n in range(4))


def test_a_page_is_let_go_with_the_last_session_that_keeps_it() -> None:
    leases = SessionLeases(8, 100)
    assert leases.renew(1, "x", b"root", [A, B], 16, 0, 10) == Change([A, B], [])
    assert leases.renew(1, "y", b"root", [A, C], 16, 5, 10) == Change([A, C], [])
    assert leases.renew(1, "x", b"root", [A], 16, 6, 10) == Change([A], [B])
    assert leases.expire(14) == []
    assert leases.due == 15
    assert leases.expire(15) == [C]
    assert leases.expire(16) == [A]
    # an end drops what no other session names, kept or not
    assert leases.end(1, "y") == Change((), [], [C])
    assert leases.end(1, "x") == Change((), [], [A])
    assert leases.end(1, "x") == Change((), [], [])
    assert len(leases) == leases.kept == 0


def test_sessions_keep_no_more_than_their_share_and_the_oldest_is_let_go_first() -> None:
    leases = SessionLeases(3, 100)
    leases.renew(1, "x", b"root", [A, B], 16, 0, 10)
    assert leases.renew(1, "y", b"root", [C, D], 16, 1, 10) == Change([C, D], [A, B])
    assert leases.renew(1, "z", b"other", [A, B, C, D], 16, 2, 10) == Change([A, B, C], [D])
    assert leases.kept == 3
    # a table without end names no more than it may, either
    small = SessionLeases(3, 4)
    for n in range(9):
        small.renew(1, f"s{n}", b"root", [bytes([n, m]) * 16 for m in range(2)], 16, n, 10)
    assert len(small) == 2
    # nor are there more leases than that, of the same page or of none
    for n in range(9):
        small.renew(1, f"t{n}", b"root", [A] if n % 2 else [], 16, n, 10)
        assert small.check() == []
    assert len(small) == 4


def test_a_session_of_two_holders_is_over_when_both_say_so_or_are_gone() -> None:
    leases = SessionLeases(8, 100)
    leases.renew(1, "x", b"root", [A], 16, 0, 10)
    leases.renew(2, "x", b"root", [A, B], 16, 0, 10)
    assert leases.end(1, "x") == Change((), [A, B], [A, B])
    assert len(leases) == 1
    assert leases.leave(2) == Change((), [], [A, B])
    assert len(leases) == 0
    # a connection that ends without a word gives its pages to everybody
    leases.renew(3, "x", b"root", [A, B], 16, 0, 10)
    assert leases.leave(3) == Change((), [A, B], [])
    assert len(leases) == leases.kept == 0


@pytest.mark.parametrize("seed", range(5))
def test_whatever_sessions_do_the_counts_are_right_and_nothing_is_left(seed: int) -> None:
    draw = random.Random(seed)
    leases = SessionLeases(12, 60)
    marked: set[bytes] = set()
    for now in range(3000):
        what, session, holder = draw.random(), f"s{draw.randrange(8)}", draw.randrange(3)
        if what < 0.6:
            branch = draw.randrange(3)
            chain = [bytes([branch if at > 2 else 0, at]) * 16 for at in range(draw.randrange(9))]
            change = leases.renew(holder, session, b"root", chain, 16, now, draw.randrange(1, 40))
        elif what < 0.8:
            change = Change([], leases.expire(now))
        elif what < 0.9:
            change = leases.end(holder, session)
        else:
            change = leases.leave(holder)
        marked = marked - set(change.let_go) | set(change.keep)
        assert leases.check() == []
        # exactly the kept pages are marked
        assert len(marked) == leases.kept
    for holder in range(3):
        marked -= set(leases.leave(holder).let_go)
    assert not marked
    assert len(leases) == 0


def there(client: MemoryManagerClient, names: np.ndarray) -> dict[int, int]:
    """How many pages are in which tiers."""
    return dict(Counter(client.probe("kv", names).tolist()))


def test_kept_pages_outlive_a_flood_but_do_not_stop_it(manager: Make) -> None:
    with manager(pools=(PoolSpec(name="kv", page_bytes=64, l1_pages=64),)).client() as client:
        kept, others = keys(16), keys(300)
        store(client, kept)
        client.keep_session("kv", "s", b"root", kept, tokens=16, ttl=60)
        for at in range(0, 300, 10):
            store(client, others[at : at + 10])
        assert there(client, kept) == {L1: 16}
        # reservations take all there is, kept pages too
        room = client.reserve("kv", 64)
        assert there(client, kept) == {0: 16}
        client.abort("kv", room.token)


def test_the_end_of_its_time_moves_a_sessions_pages_down_and_its_end_drops_them(manager: Make) -> None:
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=64, l2_pages=256)
    with manager(pools=(spec,), movers=(("copy",),)).client() as client:
        wait_for_mover(client)
        names, other = keys(12), keys(4)
        store(client, names)
        store(client, other)
        client.keep_session("kv", "s", b"root", names, tokens=16, ttl=0.05)
        client.keep_session("kv", "t", b"root", np.concatenate([names[:3], other]), tokens=16, ttl=60)
        (row,) = client.session_tiers("s")
        assert (row.pool, row.page_bytes, row.tokens, row.l1, row.l2, row.l3) == ("kv", PAGE, 16, 12, 0, 0)
        while there(client, names).get(L2, 0) < 9:  # the three that another session keeps stay where they are
            client.wait_end(0.01)
        assert there(client, names) == {L1: 3, L2: 9}
        (row,) = client.session_tiers("s")
        assert (row.kept, row.l1, row.l2) == (0, 3, 9)
        pinned = client.lookup("kv", names[3:4])
        client.end_session("s")
        while len(there(client, names)) == 2:
            client.wait_end(0.01)
        # one is in use, three belong to the other session too; no trace of the session is left
        assert there(client, names) == {L1: 3, L2: 1, 0: 8}
        assert client.session_tiers("s") == ()
        client.unpin("kv", pinned.lease)
        client.end_session("t")
        while there(client, other) != {0: 4}:
            client.wait_end(0.01)
        assert client.stats()["pool_session_leases/kv"] == 0


WIDE = PoolSpec(name="kv", page_bytes=64, l1_pages=4096)


def keep_many(client: MemoryManagerClient) -> np.ndarray:
    """2,000 pages of session `s`, whose end the server works through in slices."""
    names = keys(2000)
    for at in range(0, len(names), 500):
        store(client, names[at : at + 500])
    client.keep_session("kv", "s", b"root", names, tokens=16, ttl=60)
    return names


def test_pages_that_another_session_keeps_before_their_turn_to_go_stay(manager: Make) -> None:
    with PostingClient(manager(pools=(WIDE,)).path) as client:
        names = keep_many(client)
        ended = client.post(end_session_request("s"), lambda _: None)
        kept = client.post(keep_session_request("kv", "t", b"root", names[:500], 16, 60), lambda _: None)
        ended()
        kept()
        while there(client, names) != {L1: 500, 0: 1500}:
            client.wait_end(0.01)
        assert there(client, names[:500]) == {L1: 500}
        assert client.stats()["pool_session_dropped/kv"] == 1500


def test_pages_stored_anew_before_their_turn_to_go_stay(manager: Make) -> None:
    with PostingClient(manager(pools=(WIDE,)).path) as client:
        names = keep_many(client)
        room = client.reserve("kv", 100)
        asked = (
            end_session_request("s"),
            Request(Op.DROP, PoolName("kv"), (names[:200],), 0.0),
            commit_request("kv", room.token, names[:100], None, False, False),
        )
        for answer in [client.post(one, lambda _: None) for one in asked]:
            answer()
        while there(client, names) != {L1: 100, 0: 1900}:
            client.wait_end(0.01)
        assert there(client, names[:100]) == {L1: 100}


def test_the_leases_of_a_killed_client_are_gone_and_its_pages_are_anybodys(manager: Make) -> None:
    server = manager()
    names = keys(8)
    with server.client() as client:
        store(client, names)
        puppet = Puppet(server.path)
        puppet.do(f"c.keep_session('kv', 's', b'r', np.frombuffer({names.tobytes()!r}, 'u1').reshape(-1, 32), "
                  "tokens=16, ttl=60)")  # fmt: skip
        assert client.stats()["pool_session_kept_pages/kv"] == 8
        puppet.kill()
        server.settle()
        assert client.stats()["pool_session_kept_pages/kv"] == client.stats()["pool_session_leases/kv"] == 0
        assert there(client, names) == {L1: 8}


def test_what_makes_no_sense_is_refused(manager: Make) -> None:
    server = manager()
    with server.client() as client, server.client(read_only=True) as reader:
        for wrong in ({"tokens": 0, "ttl": 1.0}, {"tokens": 16, "ttl": 0.0}, {"tokens": 16, "ttl": float("nan")}):
            with pytest.raises(BadArgument):
                client.keep_session("kv", "s", b"root", keys(1), **wrong)
        with pytest.raises(BadArgument):
            client.keep_session("kv", "", b"root", keys(1), tokens=16, ttl=1)
        with pytest.raises(Refused):
            reader.keep_session("kv", "s", b"root", keys(1), tokens=16, ttl=1)
        with pytest.raises(Refused):
            reader.end_session("s")
