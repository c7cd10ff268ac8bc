"""What is under way between two nodes when one of them begins a new life or falls silent comes to its end soon."""

import asyncio
import contextlib
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq.asyncio
from cluster_nodes import PAGE, POOL, PlayedNode, eventually, keys, two_met

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import JobFailed
from omni_flow.data.identity import handshake_vector
from omni_flow.data.transfer import base, cluster, link
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.client import TransferClient
from omni_flow.data.transfer.errors import PeerUnreachable
from omni_flow.data.transfer.node_config import NodeConfig
from omni_flow.data.transfer.pulling import Transfers

RUNNING = f"pool_jobs_running/{POOL}"


@pytest.fixture
def started():
    """Starts a pull or push of page 1 in a thread, with a session of its own; its result is a future."""
    with ThreadPoolExecutor(1) as threads:

        def start(verb, node, other, timeout_s=60.0):
            def run():
                with MemoryManagerClient(node.server.path) as client:
                    return getattr(TransferClient(client), verb)(POOL, keys(1), other, timeout_s=timeout_s).tolist()

            result = threads.submit(run)
            eventually(lambda: node.client.stats()[RUNNING], 1)
            return result

        yield start


@pytest.fixture
def patient_pair(node):
    """Two nodes that have met and take no silence for death."""
    return two_met(node, silent_s=60.0)


def asked_and_asker(pair, verb):
    """Which of the two is asked for a pull from the first, or a push to the second, and which asks."""
    return pair if verb == "pull" else pair[::-1]


def begin_anew(victim, other, where):
    """A node that does not answer any more dies and begins a new life, at the same address or at another."""
    victim.kill_process()
    victim.options["peers"] = (other.address,)
    if where == "same":
        victim.options["listen"] = victim.address
    victim.start_process()


@pytest.mark.parametrize("where", ["same", "another"])
@pytest.mark.parametrize("verb", ["pull", "push"])
def test_what_a_node_has_not_answered_goes_on_with_its_next_life(patient_pair, started, verb, where):
    first, second = patient_pair
    asked, asker = asked_and_asker(patient_pair, verb)
    first.put(1)
    os.kill(asked.process.pid, signal.SIGSTOP)
    answer = started(verb, asker, asked.name)
    begin_anew(asked, asker, where)
    assert answer.result() == [True]
    assert second.has(1) == [True]
    eventually(first.pinned, 0)


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_what_was_asked_of_a_node_ends_when_that_node_is_silent(mortal_pair, started, verb):
    first, _ = mortal_pair
    asked, asker = asked_and_asker(mortal_pair, verb)
    first.put(1)
    os.kill(asked.process.pid, signal.SIGSTOP)
    assert started(verb, asker, asked.name).result() == [False]
    os.kill(asked.process.pid, signal.SIGCONT)
    eventually(asker.transfer.nodes, (asked.name,))
    eventually(first.pinned, 0)


@pytest.fixture
def played(node):
    """A node and one that the test plays, which have met."""
    other = PlayedNode()
    real = node("a", other)
    other.connect(real.address)
    other.beat()
    other.until(w.AskRows)[1](w.Rows(other.epoch, 0, {}))
    eventually(real.transfer.nodes, ("x",))
    yield real, other
    other.close()


def pinned(lease, port=1):
    """The answer to a Pin of page 1; what listens at `port` is no driver."""
    endpoint = base.Endpoint("tcp", "127.0.0.1", port, bytes(16), bytes(32))
    return w.Pinned(lease, endpoint, bytes(4), b"\1", bytes(4), bytes(8))


@pytest.mark.parametrize("how", ["silent", "anew"])
def test_reading_from_a_node_ends_with_that_node(played, started, how):
    real, other = played
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pull = started("pull", real, "x", 20.0)
        other.until(w.Pin)[1](pinned(7, listener.getsockname()[1]))
        with listener.accept()[0]:
            if how == "anew":
                other.epoch += 1
                other.beat()
            assert pull.result() == [False]
    assert other.until(w.Unpin)[0] == w.Unpin(7)


def test_a_node_that_says_that_it_lives_anew_has_the_pins_of_its_new_life_only(node):
    real, other = node("a", silent_s=60.0), PlayedNode()
    real.put(1)
    with contextlib.closing(other):
        other.connect(real.address)
        for other.epoch in (1, 2):
            other.ask(w.Meet(w.PROTOCOL, "x", other.epoch, other.address, handshake_vector()))
            other.ask(w.Pin("x", other.epoch, POOL, PAGE, keys(1)[0], 60_000))
        eventually(lambda: real.client.stats()["transfer_leases"], 1)
        assert real.pinned() == 1


def play_with_a_cluster(play, **options):
    """Run a node's `Cluster` while `play(address)`, in a thread, is its other nodes."""

    async def ended(_node, _epoch):
        pass

    async def handle(_said):
        pass

    async def run():
        config = NodeConfig(manager="", name="a", beat_s=0.05, **options)
        real = cluster.Cluster(config, (POOL,), ended, handle)
        living = asyncio.create_task(real.run())
        try:
            await asyncio.to_thread(play, real.address)
            assert not living.done()
        finally:
            living.cancel()
            await asyncio.wait([living])
            real.close()

    asyncio.run(run())


def test_a_node_that_says_its_name_is_met_at_once_where_our_first_words_were_lost(monkeypatch):
    monkeypatch.setattr(cluster, "MEET_S", 3600.0)

    def play(address):
        other.connect(address)
        other.until(w.Meet)  # and is not answered
        other.ask(w.Meet(w.PROTOCOL, "x", 1, other.address, handshake_vector()))
        other.until(w.Meet)

    with contextlib.closing(PlayedNode()) as other:
        play_with_a_cluster(play, peers=(other.address,))


def test_the_address_where_nobody_has_been_for_the_longest_makes_room_for_a_new_one(monkeypatch):
    """Never one of the configuration, of a node that was met, or where somebody was a while ago."""
    monkeypatch.setattr(cluster, "MAX_NODES", 4)
    absent = PlayedNode("absent")
    absent.close()
    made, of = cluster.Cluster, {}

    def remember(config, *rest):
        of["a"], of["loop"] = made(config, *rest), asyncio.get_running_loop()
        return of["a"]

    monkeypatch.setattr(cluster, "Cluster", remember)

    def between_its_steps(look):
        """What `look(links)` returns while nothing else of the cluster runs."""

        async def run():
            return look(of["a"]._links)

        return asyncio.run_coroutine_threadsafe(run(), of["loop"]).result()

    def known():
        return between_its_steps(set)

    def long_ago(address, seconds):
        """Nobody has been there for so long."""

        def earlier(links):
            links[address].since -= seconds

        between_its_steps(earlier)

    def at(port):
        return f"tcp://127.0.0.1:{port}"

    def new(port):
        """An address of which a node tells, and where nobody listens. Returns the answer."""
        return first.ask(w.Meet(w.PROTOCOL, "first", 1, at(port), handshake_vector()))

    def play(address):
        for node in (first, second):
            node.connect(address)
        for node in (first, second):
            node.ask(w.Meet(w.PROTOCOL, node.name, 1, node.address, handshake_vector()))
            node.until(w.Beat)  # it was met
        assert isinstance(new(1), w.Met)
        assert known() == {absent.address, first.address, second.address, at(1)}
        refused = new(2)  # nobody was there for too short a time
        assert isinstance(refused, w.Sorry)
        assert "4 addresses are known already" in refused.message
        for gone in (absent.address, first.address, second.address, at(1)):
            long_ago(gone, 3600)
        assert isinstance(new(2), w.Met)
        assert known() == {absent.address, first.address, second.address, at(2)}
        first.say(w.Beat("second", 2, 0, {}))  # it lives anew, somewhere else
        eventually(lambda: between_its_steps(lambda links: links[second.address].met), None)
        long_ago(at(2), 3600)
        long_ago(second.address, 7200)
        assert isinstance(new(3), w.Met)
        assert known() == {absent.address, first.address, at(2), at(3)}

    with contextlib.closing(PlayedNode("first")) as first, contextlib.closing(PlayedNode("second")) as second:
        play_with_a_cluster(play, peers=(absent.address,), silent_s=60.0)


def test_what_is_told_a_node_whose_address_was_forgotten_is_dropped_and_what_is_asked_of_it_fails():
    async def run():
        with contextlib.closing(PlayedNode()) as other, zmq.asyncio.Context() as context:
            line = link.Link(context, other.address, "")
            line.close()
            await line.tell(w.Unpin(1))
            with pytest.raises(PeerUnreachable, match="forgotten"):
                await line.ask(w.AskRows(), w.Rows, 5.0)

    asyncio.run(run())


def test_what_an_earlier_life_has_said_and_comes_late_counts_for_nothing(node):
    real, other = node("a", silent_s=60.0), PlayedNode()
    real.put(1)
    with contextlib.closing(other):
        other.connect(real.address)
        for other.epoch in (1, 2):
            other.ask(w.Meet(w.PROTOCOL, "x", other.epoch, other.address, handshake_vector()))
        lease = other.ask(w.Pin("x", 2, POOL, PAGE, keys(1)[0], 60_000)).lease
        other.epoch = 1
        other.beat()
        assert other.ask(w.Pin("x", 1, POOL, PAGE, keys(1)[0], 60_000)).code == "refused"
        assert other.ask(w.Unpin(lease)) == w.Unpinned(True)
        assert real.pinned() == 0


def test_a_pin_for_which_nobody_waits_any_more_is_given_back(played, started):
    real, other = played
    pull = started("pull", real, "x", 0.5)
    answer = other.until(w.Pin)[1]
    with pytest.raises(JobFailed):
        pull.result()
    answer(pinned(7))
    assert other.until(w.Unpin)[0] == w.Unpin(7)


def test_what_is_meant_for_a_lease_of_an_earlier_life_ends_none_of_this(node):
    real, other = node("a"), PlayedNode()
    real.put(1)
    pin = w.Pin("x", 1, POOL, PAGE, keys(1)[0], 60_000)
    with contextlib.closing(other):
        other.connect(real.address)
        before = other.ask(pin).lease
        real.kill_process()
        real.options["listen"] = real.address
        real.start_process()
        now = other.ask(pin).lease
        assert other.ask(w.Unpin(before)) == w.Unpinned(False)
        assert real.pinned() == 1
        assert other.ask(w.Unpin(now)) == w.Unpinned(True)


class LateDriver(base.Driver):
    """A transport whose reads, once begun, end when they end: `cancel` only asks."""

    def __init__(self, done):
        self.done, self.jobs, self.cancelled = done, [], asyncio.Event()

    def register_arena(self, arena, fd, size, access):
        pass

    def endpoint(self):
        return base.Endpoint("late", "127.0.0.1", 1, bytes(16))

    def start(self, job):
        self.jobs.append(job.id)

    def cancel(self, job):
        self.cancelled.set()

    def progress(self, job):
        return None

    def close(self):
        pass


def test_a_read_that_is_cancelled_twice_returns_only_when_nothing_can_write_any_more():
    async def run():
        transfers = Transfers()
        driver = transfers.driver = LateDriver(transfers.done)
        read = asyncio.create_task(transfers.read(driver.endpoint(), 1, 1, np.array([[0, 0, 8]], np.uint64), 60.0))
        await asyncio.sleep(0)
        read.cancel()
        await driver.cancelled.wait()
        read.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not read.done()
        driver.done(base.Outcome(driver.jobs[0], 0, "cancelled"))
        with pytest.raises(asyncio.CancelledError):
            await read

    asyncio.run(run())
