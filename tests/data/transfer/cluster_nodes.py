"""Nodes for the transfer tests: each a memory manager and a transfer process with a directory of their own."""

import hashlib
import json
import os
import subprocess
import sys
import time

import msgspec
import numpy as np
import zmq

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.messages import L1, L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.client import TransferClient
from omni_flow.data.transfer.node_config import NodeConfig

PAGE = 16 << 10
POOL = "kv"


def keys(*numbers):
    return [hashlib.sha256(str(number).encode()).digest() for number in numbers]


def page(number, size=PAGE):
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


class ClusterNode:
    """One node. `client` is a session of the test with its manager."""

    def __init__(self, directory, name, peers=(), page_bytes=PAGE, **options):
        directory.mkdir()
        self.name = name
        pool = PoolSpec(name=POOL, page_bytes=page_bytes, l1_pages=64, l2_pages=64)
        self.server = ServerConfig(path=str(directory / "manager.sock"), pools=(pool,), huge=False)
        known = {"manager": self.server.path, "name": name, "peers": peers}
        self.options = known | {"beat_s": 0.05, "silent_s": 3.0} | options
        self.manager = start(self.server)
        self.client = MemoryManagerClient(self.server.path, name=f"test {name}")
        self.transfer = TransferClient(self.client)
        self.start_process()

    def start_process(self):
        config = msgspec.json.encode(NodeConfig(**self.options)).decode()
        read, write = os.pipe()
        command = [sys.executable, "-m", "omni_flow.data.transfer.node", config, "--ready-fd", str(write)]
        self.process = subprocess.Popen(command, pass_fds=(write,))
        os.close(write)
        with open(read, "rb") as ready:
            line = ready.readline()
        assert line, f"the transfer process ended with {self.process.wait()}"
        self.address = json.loads(line)["address"]

    def put(self, *numbers, tier=L1, pages=None):
        room = self.client.reserve(POOL, len(numbers), tier=tier)
        arena = self.client.arena(f"{POOL}/{'l1' if tier == L1 else 'l2'}", write=True)
        for number, slot in zip(numbers, room.slots.tolist(), strict=True):
            arena.array[slot * PAGE : (slot + 1) * PAGE] = page(number) if pages is None else pages[number]
        self.client.commit(POOL, room.token, keys(*numbers))

    def get(self, *numbers):
        """Bytes of pages that are here, None for the others."""
        found = []
        for number in numbers:
            match = self.client.lookup(POOL, keys(number), tiers=L1 | L2)
            if not match.pages:
                found.append(None)
                continue
            arena = self.client.arena(f"{POOL}/{'l1' if match.tiers[0] == L1 else 'l2'}")
            at = int(match.slots[0]) * PAGE
            found.append(arena.array[at : at + PAGE].copy())
            self.client.unpin(POOL, match.lease)
        return found

    def has(self, *numbers):
        return (self.client.probe(POOL, keys(*numbers)) != 0).tolist()

    def kill_process(self):
        self.process.kill()
        self.process.wait()

    def pinned(self):
        stats = self.client.stats()
        return stats[f"pool_l1_pinned/{POOL}"] + stats[f"pool_l2_pinned/{POOL}"]

    def close(self):
        self.kill_process()
        self.client.close()
        self.manager.kill()
        self.manager.wait()


def eventually(what, wanted=True):
    """Ask until it is so; every ask is a round trip to another process."""
    end = time.monotonic() + 20
    while (found := what()) != wanted:
        assert time.monotonic() < end, f"stays {found!r}, not {wanted!r}"


def two_met(node, **options):
    """Two nodes that have met; `node` makes them."""
    first = node("a", **options)
    second = node("b", first, **options)
    eventually(first.transfer.nodes, ("b",))
    eventually(second.transfer.nodes, ("a",))
    return first, second


class PlayedNode:
    """A node that the test plays: it has only its lines, and does what the test says, right or wrong."""

    def __init__(self, name="x"):
        self.name, self.epoch = name, 1
        self._context = zmq.Context()
        self._heard = self._context.socket(zmq.ROUTER)
        self._heard.linger = 0
        self.address = f"tcp://127.0.0.1:{self._heard.bind_to_random_port('tcp://127.0.0.1')}"
        self._line = self._context.socket(zmq.DEALER)
        self._line.linger = 0

    def connect(self, address):
        self._line.connect(address)

    def say(self, message, id=0):
        self._line.send_multipart([id.to_bytes(8, "little"), w.encode(message)])

    def ask(self, message):
        self.say(message, 1)
        assert self._line.poll(20_000), f"{message} was not answered"
        return w.decoder.decode(self._line.recv_multipart()[1])

    def beat(self):
        self.say(w.Beat(self.name, self.epoch, 0, {}))

    def until(self, kind):
        """Live as a node does until a message of this kind comes. Returns: it, and how to answer it."""
        end = time.monotonic() + 20
        while True:
            assert self._heard.poll(1000 * max(end - time.monotonic(), 0)), f"no {kind.__name__} came"
            who, id, body = self._heard.recv_multipart()
            message = w.decoder.decode(body)
            if isinstance(message, kind):
                return message, lambda answer, to=(who, id): self._heard.send_multipart([*to, w.encode(answer)])
            if isinstance(message, w.Meet):
                self._heard.send_multipart([who, id, w.encode(w.Met(self.name, self.epoch, ()))])
            elif isinstance(message, w.AskRows):
                self._heard.send_multipart([who, id, w.encode(w.Rows(self.epoch, 0, {}))])
            elif isinstance(message, w.Beat):
                self.beat()

    def close(self):
        self._context.destroy(linger=0)
