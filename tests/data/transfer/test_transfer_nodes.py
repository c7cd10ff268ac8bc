"""Pull, push and the directory between nodes: separate managers and transfer processes with separate directories."""

import os
import signal
import threading

import numpy as np
import pytest
import zmq
from cluster_nodes import PAGE, POOL, ClusterNode, eventually, keys, page

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError, NoMover
from omni_flow.data.identity import handshake_vector
from omni_flow.data.layout import AttentionGroup, object_views, plan_gather
from omni_flow.data.messages import L2
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.client import TransferClient
from omni_flow.data.transfer.registry import available_drivers


@pytest.fixture(scope="module")
def kept_pair(tmp_path_factory):
    """Two nodes that have met, shared by the tests that kill nothing."""
    place = tmp_path_factory.mktemp("kept")
    first = ClusterNode(place / "a", "a")
    second = ClusterNode(place / "b", "b", (first.address,))
    eventually(first.transfer.nodes, ("b",))
    eventually(second.transfer.nodes, ("a",))
    yield first, second
    for each in (first, second):
        each.close()


@pytest.fixture
def pair(kept_pair):
    """The shared nodes, empty."""
    for each in kept_pair:
        each.client.drop(POOL, keys(*range(100)))
    for each in kept_pair:
        eventually(lambda: each.transfer.locate(POOL, keys(*range(100))), {})  # noqa: B023
    yield kept_pair
    for each in kept_pair:
        assert each.client.check() == []
        assert each.pinned() == 0


def same(found, *numbers):
    return all(f is not None and np.array_equal(f, page(n)) for f, n in zip(found, numbers, strict=True))


def test_a_pull_brings_exactly_the_pages_that_are_there(pair):
    first, second = pair
    first.put(1, 2, 3)
    first.put(4, 5, tier=L2)
    ok = second.transfer.pull(POOL, keys(1, 9, 2, 4, 5), "a")
    assert ok.tolist() == [True, False, True, True, True]
    assert same(second.get(1, 2, 4, 5), 1, 2, 4, 5)
    assert second.has(9, 3) == [False, False]
    assert first.pinned() == second.pinned() == 0


def test_a_pull_without_a_source_asks_who_has_it(node):
    first = node("a")
    second = node("b", first)
    third = node("c", first)
    first.put(1, 2)
    second.put(3)
    eventually(lambda: sorted(third.transfer.locate(POOL, keys(1, 2, 3))), ["a", "b"])
    assert third.transfer.locate(POOL, keys(1, 2, 3))["a"].tolist() == [True, True, False]
    assert third.transfer.pull(POOL, keys(1, 3, 2, 4)).tolist() == [True, True, True, False]
    assert same(third.get(1, 2, 3), 1, 2, 3)


def test_the_manager_shows_what_its_transfer_process_has_done(pair):
    first, second = pair
    first.put(1, 2)
    before = second.client.stats()
    assert second.transfer.pull(POOL, keys(1, 2), "a").all()

    def moved():
        now = second.client.stats()
        return now["transfer_bytes"] - before["transfer_bytes"], now["transfer_pages"] - before["transfer_pages"]

    eventually(moved, (2 * PAGE, 2))
    assert second.client.stats()["transfer_nodes"] == 1
    assert second.client.stats()["transfer_checksum_failures"] == 0


def test_a_push_makes_the_target_pull(pair):
    first, second = pair
    first.put(1, 2)
    second.put(2)
    assert first.transfer.push(POOL, keys(1, 2), "b").tolist() == [True, True]
    assert same(second.get(1, 2), 1, 2)
    assert first.pinned() == second.pinned() == 0


def test_what_was_pulled_can_be_pulled_from_the_puller(node):
    first = node("a")
    second = node("b", first)
    third = node("c", second)
    first.put(1)
    eventually(second.transfer.nodes, ("a", "c"))
    assert second.transfer.pull(POOL, keys(1), "a").all()
    first.close()
    eventually(lambda: list(third.transfer.locate(POOL, keys(1))), ["b"])
    assert third.transfer.pull(POOL, keys(1)).all()
    assert same(third.get(1), 1)


def test_the_directory_follows_what_comes_and_goes(pair):
    first, second = pair
    assert second.transfer.locate(POOL, keys(1)) == {}
    first.put(1, 2)
    eventually(lambda: list(second.transfer.locate(POOL, keys(1))), ["a"])
    first.client.drop(POOL, keys(1))
    eventually(lambda: second.transfer.locate(POOL, keys(1)), {})
    assert list(second.transfer.locate(POOL, keys(2))) == ["a"]


def test_a_node_that_comes_later_learns_what_was_there_before(node):
    first = node("a")
    first.put(*range(20))
    second = node("b", first)
    eventually(lambda: [mask.all() for mask in second.transfer.locate(POOL, keys(*range(20))).values()], [True])


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_rows_of_a_dead_node_are_dropped(mortal_pair, how):
    first, second = mortal_pair
    first.put(1)
    eventually(lambda: list(second.transfer.locate(POOL, keys(1))), ["a"])
    if how == "killed":
        first.kill_process()
    else:
        os.kill(first.process.pid, signal.SIGSTOP)
    eventually(second.transfer.nodes, ())
    assert second.transfer.locate(POOL, keys(1)) == {}
    assert not second.transfer.pull(POOL, keys(1), "a").any()
    if how == "stopped":
        os.kill(first.process.pid, signal.SIGCONT)
        eventually(lambda: list(second.transfer.locate(POOL, keys(1))), ["a"])


def test_a_restarted_transfer_process_is_a_new_life_with_all_rows(mortal_pair):
    first, second = mortal_pair
    first.put(1, 2)
    eventually(lambda: list(second.transfer.locate(POOL, keys(1, 2))), ["a"])
    first.kill_process()
    first.options["peers"] = (second.address,)
    first.start_process()
    first.put(3)
    eventually(lambda: [mask.all() for mask in second.transfer.locate(POOL, keys(1, 2, 3)).values()], [True])
    assert second.transfer.pull(POOL, keys(1, 2, 3), "a").all()


def pull_all(node, timeout_s, errors, numbers=range(60)):
    """Pull pages from a in a session of its own; notes the error."""
    with MemoryManagerClient(node.server.path) as client:
        try:
            TransferClient(client).pull(POOL, keys(*numbers), "a", timeout_s=timeout_s)
        except DataError as error:
            errors.append(error)


def test_the_death_of_the_puller_gives_the_sources_pins_back(mortal_pair):
    first, second = mortal_pair
    first.put(*range(60))
    os.kill(first.process.pid, signal.SIGSTOP)
    errors = []
    puller = threading.Thread(target=pull_all, args=(second, 1.5, errors))
    puller.start()
    eventually(lambda: second.client.stats()[f"pool_jobs_running/{POOL}"], 1)
    second.kill_process()
    os.kill(first.process.pid, signal.SIGCONT)
    eventually(first.transfer.nodes, ())
    eventually(first.pinned, 0)
    puller.join(30)
    assert len(errors) == 1
    assert second.has(*range(60)) == [False] * 60
    second.start_process()
    eventually(second.transfer.nodes, ("a",))
    assert second.transfer.pull(POOL, keys(*range(60)), "a").all()


def test_the_death_of_the_source_ends_the_pull_and_leaks_nothing(mortal_pair):
    first, second = mortal_pair
    first.put(*range(60))
    os.kill(first.process.pid, signal.SIGSTOP)
    errors = []
    puller = threading.Thread(target=pull_all, args=(second, 1.5, errors))
    puller.start()
    eventually(lambda: second.client.stats()[f"pool_jobs_running/{POOL}"], 1)
    first.kill_process()
    puller.join(30)
    assert len(errors) == 1
    eventually(second.pinned, 0)
    assert second.has(*range(60)) == [False] * 60
    eventually(first.pinned, 0)


def test_the_transfer_process_ends_with_its_manager(mortal_pair):
    first, _ = mortal_pair
    first.manager.kill()
    first.manager.wait()
    assert first.process.wait(20) == 0


def test_pages_of_another_size_are_refused(node):
    first = node("a")
    second = node("b", first, page_bytes=2 * PAGE)
    eventually(second.transfer.nodes, ("a",))
    first.put(1)
    assert not second.transfer.pull(POOL, keys(1), "a").any()


def test_without_a_transfer_process_a_pull_says_so(node):
    first = node("a")
    first.kill_process()
    eventually(lambda: first.client.stats()["job_movers"], 0)
    with pytest.raises(NoMover):
        first.transfer.pull(POOL, keys(1), "b")
    with pytest.raises(NoMover, match="transfer process"):
        first.transfer.nodes()


def test_nodes_with_the_shared_key_meet_and_one_with_another_does_not(node):
    first = node("a", key="sixteen bytes or more")
    second = node("b", first, key="sixteen bytes or more")
    stranger = node("x", first, key="another key of that length")
    eventually(second.transfer.nodes, ("a",))
    first.put(1)
    assert second.transfer.pull(POOL, keys(1), "a").all()
    assert stranger.transfer.nodes() == ()
    assert first.transfer.nodes() == ("b",)


def test_garbage_at_the_control_port_changes_nothing(pair):
    first, second = pair
    wrong = [
        w.Beat("x", 1, 1, {"kv": (b"123", b"")}),
        w.Meet(w.PROTOCOL, "x", 1, "no address", handshake_vector()),
        w.Meet(w.PROTOCOL, "x", 1, "tcp://192.0.2.1:1", handshake_vector()),
        w.Meet(w.PROTOCOL, "x", 1, "tcp://127.0.0.1:1", b"another vector"),
        w.Pin("x", 1, POOL, PAGE, b"short", 1000),
        w.Pin("x", 1, "nothing", PAGE, bytes(32), 1000),
        w.Pin("x", 1, POOL, PAGE, bytes(32), -1),
        w.Take("b", POOL, b"odd", 1000),
        w.Take("nobody", POOL, bytes(32), 1000),
        w.Met("x", 1, ()),
    ]
    context = zmq.Context()
    with context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(first.address)
        for frames in (
            [b""],
            [b"x" * 8],
            [b"x" * 8, b"\xc1"],
            [b"x" * 8, b"\x80"],
            [b"12345678", b"\x92\x01"],
            [b"1"] * 5,
        ):
            sock.send_multipart(frames)
        for id, message in enumerate(wrong, 1):
            sock.send_multipart([id.to_bytes(8, "little"), w.encode(message)])
        for _ in wrong:
            assert sock.poll(10_000)
            assert isinstance(w.decoder.decode(sock.recv_multipart()[1]), w.Sorry)
        assert sock.poll(0) == 0
    context.term()
    first.put(1)
    assert second.transfer.pull(POOL, keys(1), "a").all()


@pytest.mark.parametrize("driver", available_drivers())
def test_a_pull_works_over_each_driver(node, driver):
    first = node("a", driver=driver)
    second = node("b", first, driver=driver)
    eventually(second.transfer.nodes, ("a",))
    first.put(1, 2)
    assert second.transfer.pull(POOL, keys(1, 2), "a").all()
    assert same(second.get(1, 2), 1, 2)


def test_a_reader_with_another_tp_on_another_node_gathers_what_it_needs(pair):
    """Four writers of two KV heads each on one node; on the other, rank 1 of 2 reads four heads."""
    first, second = pair
    group = AttentionGroup("g", layers=2, kv_heads=8, tokens=16, key_bytes=128, value_bytes=128)
    boxes = [group.share(4, rank) for rank in range(4)]
    assert group.nbytes(boxes[0]) == PAGE
    whole = [np.random.default_rng(n).integers(0, 256, (2, 16, 8, 128), np.uint8) for n in range(2)]
    pages = {}
    for rank, box in enumerate(boxes):
        pages[rank] = np.zeros(PAGE, np.uint8)
        for view, block in zip(object_views(group, box, pages[rank]), whole, strict=True):
            view[:] = block[:, :, box.heads.start : box.heads.stop]
    first.put(0, 1, 2, 3, pages=pages)
    target = group.share(2, 1)
    plan = plan_gather(group, target, boxes)
    assert second.transfer.pull(POOL, keys(*plan.used), "a").all()
    assert second.has(0, 1, 2, 3) == [False, False, True, True]
    objects = dict(zip(plan.used, second.get(*plan.used), strict=True))
    sources = [object_views(group, box, objects[n]) if n in objects else () for n, box in enumerate(boxes)]
    out = np.zeros(group.nbytes(target), np.uint8)
    plan.run(sources, object_views(group, target, out))
    for view, block in zip(object_views(group, target, out), whole, strict=True):
        assert np.array_equal(view, block[:, :, 4:8])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_at_random_moments_never_give_wrong_bytes_or_leave_pins(mortal_pair):
    first, second = mortal_pair
    numbers = range(48)
    first.put(*numbers)
    dice = np.random.default_rng(11)
    moment = threading.Event()
    for _ in range(20):
        second.client.drop(POOL, keys(*numbers))
        puller = threading.Thread(target=pull_all, args=(second, 2.0, [], numbers))
        puller.start()
        moment.wait(dice.uniform(0, 0.03))
        victim, other = (first, second) if dice.integers(2) else (second, first)
        victim.kill_process()
        puller.join(30)
        assert not puller.is_alive()
        assert all(
            found is None or np.array_equal(found, page(n))
            for n, found in zip(numbers, second.get(*numbers), strict=True)
        )
        victim.options["peers"] = (other.address,)
        victim.start_process()
        eventually(victim.transfer.nodes, (other.name,))
        eventually(other.transfer.nodes, (victim.name,))
        eventually(first.pinned, 0)
        eventually(second.pinned, 0)
    assert second.transfer.pull(POOL, keys(*numbers), "a").all()
