"""Requests that are sent before earlier ones were answered."""

from __future__ import annotations

import os
import signal

import pytest

from omni_flow.data.errors import BadArgument, BadToken, CallTimeout, Disconnected, PoolFull, StaleEpoch
from omni_flow.data.kv_client import abort_request, commit_request, per_key, probe_request, stored_of, unpin_request
from omni_flow.data.link import UnixLink
from omni_flow.data.posting_client import PostingClient

from .conftest import Make, keys


def test_posted_requests_take_effect_in_order_and_their_answers_are_read_when_wanted(manager: Make) -> None:
    with PostingClient(manager().path) as client:
        room = client.reserve("kv", 8)
        names = keys(8)
        before = client.post(probe_request("kv", names), per_key)
        first = client.post(commit_request("kv", room.token, names[:4], range(4), True, True), stored_of)
        second = client.post(commit_request("kv", room.token, names[4:], range(4, 8), True, True), stored_of)
        after = client.post(probe_request("kv", names), per_key)
        assert client.lookup("kv", names, pin=False).pages == 8  # a call in between
        assert after().tolist() == [1] * 8
        assert before().tolist() == [0] * 8
        assert [*first().slots, *second().slots] == room.slots.tolist()
        for stored in (first(), second()):
            client.post(unpin_request("kv", stored.lease, range(4)))
        assert client.drop("kv", names).tolist() == [1] * 8
        assert client.check() == []


def test_answers_that_nobody_reads_are_taken_in(manager: Make) -> None:
    with PostingClient(manager().path) as client:
        room = client.reserve("kv", 200)
        for at in range(200):
            client.post(abort_request("kv", room.token, [at]))
        for _ in range(5000):
            client.post(probe_request("kv", keys(1)), per_key)
        assert client.reserve("kv", 200).slots.size == 200


def test_a_failure_whose_answer_nobody_reads_is_told_by_the_next_request(manager: Make) -> None:
    with PostingClient(manager().path) as client:
        client.post(unpin_request("kv", 12345, [0]))
        client.ping()
        with pytest.raises(BadToken, match="12345"):
            client.post(probe_request("kv", keys(1)), per_key)


def test_a_failure_is_told_where_its_answer_is_read_and_only_there(manager: Make) -> None:
    with PostingClient(manager().path) as client:
        wrong = client.post(commit_request("kv", 12345, keys(1), [0], True, True), stored_of)
        right = client.post(probe_request("kv", keys(1)), per_key)
        assert right().tolist() == [0]
        with pytest.raises(BadToken, match="12345"):
            wrong()


def test_the_answers_of_a_server_that_has_died_do_not_come(manager: Make) -> None:
    made = manager()
    client = PostingClient(made.path)
    made.kill()
    with pytest.raises(Disconnected):
        client.post(probe_request("kv", keys(1)), per_key)()
    client.close()


def test_a_client_that_spins_looks_for_early_answers_and_sleeps_for_late_ones_within_its_time(
    manager: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager()
    looks: list[tuple[float | None, float | None]] = []
    look = UnixLink._look

    def noted(link: UnixLink, timeout: float | None) -> float | None:
        left = look(link, timeout)
        looks.append((timeout, left))
        return left

    monkeypatch.setattr(UnixLink, "_look", noted)
    with PostingClient(made.path) as client:
        client.ping()
        assert looks == []
    with PostingClient(made.path, spin=0.5) as client:
        assert client.post(probe_request("kv", keys(3)), per_key)().tolist() == [0] * 3
        room = client.reserve("kv", 4096, least=1)
        with pytest.raises(PoolFull):
            client.reserve("kv", 1, timeout=0.7)
        client.post(abort_request("kv", room.token, range(len(room.slots))))
        client.ping()
        os.kill(made.process.pid, signal.SIGSTOP)
        try:
            for timeout, least, most in ((0.05, 0.0, 0.001), (0.6, 0.0, 0.1)):
                client.timeout = timeout
                with pytest.raises(CallTimeout):
                    client.ping()
                asked, left = looks[-1]
                assert asked == timeout
                assert left is not None
                assert least < left < most + 1e-3  # it looks for as long as it may, and sleeps for the rest
        finally:
            os.kill(made.process.pid, signal.SIGCONT)
        client.timeout = 30.0
        made.kill()
        made.again()
        with pytest.raises(StaleEpoch):
            client.ping()
        looks.clear()
        client.ping()
        assert looks
    with pytest.raises(BadArgument, match="spin"):
        PostingClient(made.path, spin=-1.0)
