"""Pins that end before their reader is done, and transports that crash or start together."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zmq
from cluster_nodes import PAGE, POOL, ClusterNode, eventually, keys, page
from transfer_nodes import SIZE, SOURCE, TARGET, Memory, spans

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import handshake_vector
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.host import DriverHost


class Stranger:
    """A node that speaks the protocol, gives pages 0, 1, … of its memory for any keys, and says of its pins what it is
    told to say."""

    def __init__(self):
        self.memory = Memory()
        for number in range(8):
            self.memory.bytes[number * PAGE : (number + 1) * PAGE] = page(number)
        self.host = DriverHost("tcp")
        self.host.register_arena(SOURCE, self.memory.fd, SIZE, "read")
        self.held, self.unpinned = True, 0
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind("tcp://127.0.0.1:*")
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        beats = self._context.socket(zmq.DEALER)
        beats.linger = 0
        beat = w.encode(w.Beat("stranger", 7, 0, {}))
        while not self._stop.is_set():
            while self._router.poll(50):
                identity, number, body = self._router.recv_multipart()
                said = w.decoder.decode(body)
                if isinstance(said, w.Meet):
                    beats.connect(said.address)
                answer = self._answer(said)
                if answer is not None:
                    self._router.send_multipart([identity, number, w.encode(answer)])
            with contextlib.suppress(zmq.Again):  # nobody to tell yet, or nobody who listens any more
                beats.send_multipart([bytes(8), beat], zmq.NOBLOCK)
        beats.close()

    def _answer(self, said):
        match said:
            case w.Meet():
                return w.Met("stranger", 7, ())
            case w.AskRows():
                return w.Rows(7, 0, {})
            case w.Pin():
                numbers = np.arange(len(said.keys) // 32, dtype="<u4")
                sums = np.array([xxhash.xxh3_64_intdigest(page(n)) for n in numbers.tolist()], "<u8")
                arenas = np.full(len(numbers), SOURCE, "u1")
                raw = (column.tobytes() for column in (numbers, arenas, numbers, sums))
                return w.Pinned(1, self.host.endpoint(), *raw)
            case w.Unpin():
                self.unpinned += 1
                return w.Unpinned(self.held)
            case _:
                return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self._router.close()
        self._context.term()
        self.host.close()
        self.memory.close()


@pytest.mark.parametrize("fault", ["none", "pin ended", "other bytes"])
def test_only_pages_read_whole_while_they_were_pinned_are_taken(tmp_path, fault):
    with Stranger() as source:
        node = ClusterNode(tmp_path / "b", "b", (source.address,))
        try:
            eventually(node.transfer.nodes, ("stranger",))
            source.held = fault != "pin ended"
            if fault == "other bytes":
                source.memory.bytes[PAGE + 5] ^= 1
            taken = node.transfer.pull(POOL, keys(*range(4)), "stranger").tolist()
            assert taken == [fault == "none" or (fault == "other bytes" and n != 1) for n in range(4)]
            assert node.has(*range(4)) == taken
            for number, found in enumerate(node.get(*range(4))):
                assert found is None or np.array_equal(found, page(number))
            assert source.unpinned == 1
            assert node.pinned() == 0
            assert node.client.check() == []
        finally:
            node.close()


def test_a_source_whose_pin_has_ended_by_its_time_says_so(tmp_path):
    node = ClusterNode(tmp_path / "a", "a")
    context = zmq.Context()
    try:
        node.put(1, 2)
        with context.socket(zmq.DEALER) as reader:
            reader.linger = 0
            reader.connect(node.address)

            def ask(message):
                reader.send_multipart([(1).to_bytes(8, "little"), w.encode(message)])
                assert reader.poll(20_000)
                return w.decoder.decode(reader.recv_multipart()[1])

            asked = b"".join(keys(1, 2))
            short = ask(w.Pin("reader", 1, POOL, PAGE, asked, 50))
            eventually(node.pinned, 0)
            assert ask(w.Unpin(short.lease)) == w.Unpinned(False)
            long = ask(w.Pin("reader", 1, POOL, PAGE, asked, 60_000))
            assert node.pinned() == 2
            assert ask(w.Unpin(long.lease)) == w.Unpinned(True)
            assert ask(w.Unpin(long.lease)) == w.Unpinned(False)
            assert node.pinned() == 0
            assert ask(w.Meet(w.PROTOCOL, "x", 1, node.address, handshake_vector())).node == "a"
    finally:
        context.term()
        node.close()


def loaded(pid):
    """Shared libraries of third-party transports that a process has mapped."""
    names = {line.rsplit("/", 1)[-1].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {name for name in names if name.startswith(("libnixl", "_bindings", "libucp", "engine.", "libibverbs"))}


def test_a_manager_has_no_transport_in_it_and_outlives_the_process_that_has(tmp_path, driver):
    first = ClusterNode(tmp_path / "a", "a", driver=driver)
    second = ClusterNode(tmp_path / "b", "b", (first.address,), driver=driver)
    try:
        eventually(second.transfer.nodes, ("a",))
        first.put(1, 2)
        assert second.transfer.pull(POOL, keys(1), "a").all()
        assert bool(loaded(second.process.pid)) == (driver != "tcp")
        assert loaded(second.manager.pid) == set()
        second.kill_process()
        with MemoryManagerClient(second.server.path) as another:
            assert another.probe(POOL, keys(1)).all()
        second.start_process()
        eventually(second.transfer.nodes, ("a",))
        assert second.transfer.pull(POOL, keys(2), "a").all()
        assert os.waitid(os.P_PID, second.manager.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    finally:
        first.close()
        second.close()


def test_drivers_that_start_together_all_come_up_and_reach_each_other(driver):
    memories = [Memory(seed=n) for n in range(4)]
    with ThreadPoolExecutor(4) as starters:
        hosts = list(starters.map(lambda _: DriverHost(driver), range(4)))
    try:
        for number, (host, memory) in enumerate(zip(hosts, memories, strict=True)):
            host.register_arena(SOURCE if number else TARGET, memory.fd, SIZE, "both")
        for number in (1, 2, 3):
            rows = spans((number * PAGE, 0, PAGE))
            assert hosts[0].read(hosts[number].endpoint(), TARGET, SOURCE, rows) == PAGE
            mine = memories[0].bytes[number * PAGE : (number + 1) * PAGE]
            assert np.array_equal(mine, memories[number].bytes[:PAGE])
    finally:
        for host, memory in zip(hosts, memories, strict=True):
            host.close()
            memory.close()
