"""One client of `bench/soak.py`: KV pages and TempBuffers whose bytes follow from their names, so that anyone can
check them.

Prints one line when it finds wrong bytes or a wait past its deadline, and ends by itself only then.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import sys
import time

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError, PoolFull, StaleDescriptor, StaleEpoch
from omni_flow.data.messages import L1, L2
from omni_flow.data.temp_client import TempClient, decode_ref, encode_ref

CHAINS, LENGTH = 400, 16
SLACK_S = 2.0


def chain(number: int) -> np.ndarray:
    """The keys of one prompt."""
    return np.frombuffer(
        b"".join(hashlib.sha256(f"{number}/{i}".encode()).digest() for i in range(LENGTH)), np.uint8
    ).reshape(LENGTH, 32)


class Worker:
    """Random work until it is killed."""

    def __init__(self, path: str, seed: int, peer: socket.socket) -> None:
        self.rng = np.random.default_rng(seed)
        self.client = MemoryManagerClient(path, name=f"worker {seed}")
        self.temp = TempClient(self.client, direct=True)
        self.peer = peer
        self.peer.setblocking(False)
        self.shares: list[tuple[object, int]] = []
        self.leases: list[int] = []
        self._map()

    def _map(self) -> None:
        info = self.client.welcome.pools[0]
        self.page = info.page_bytes
        self.tiers = {
            L1: self.client.arena("kv/l1", write=True).pages(self.page, info.l1_pages),
            L2: self.client.arena("kv/l2").pages(self.page, info.l2_pages),
        }

    def fault(self, what: str) -> None:
        print(what, flush=True)
        raise SystemExit(3)

    def right(self, page: np.ndarray, key: np.ndarray) -> bool:
        """A page is its key over and over."""
        return bool((page.reshape(-1, 32) == key).all())

    def pages(self) -> None:
        keys = chain(int(self.rng.zipf(1.2)) % CHAINS)
        began = time.monotonic()
        if self.rng.random() < 0.5:
            self.client.fetch("kv", keys, timeout=5.0)
        if time.monotonic() - began > 5.0 + SLACK_S:
            self.fault(f"fetch of 5 s took {time.monotonic() - began:.1f} s")
        found = self.client.lookup("kv", keys, prefetch=True)
        for at in range(found.pages):
            if not self.right(self.tiers[int(found.tiers[at])][found.slots[at]], keys[at]):
                self.fault(f"wrong bytes in tier {found.tiers[at]}, slot {found.slots[at]}")
        if found.lease:
            self.leases.append(found.lease)
        rest = LENGTH - found.pages
        if rest:
            self._write(keys[found.pages :])
        while len(self.leases) > 3:
            self.client.unpin("kv", self.leases.pop(int(self.rng.integers(len(self.leases)))))

    def _write(self, keys: np.ndarray) -> None:
        timeout = float(self.rng.choice([0.0, 0.05, 1.0]))
        began = time.monotonic()
        try:
            room = self.client.reserve("kv", len(keys), timeout=timeout)
        except PoolFull:
            if time.monotonic() - began > timeout + SLACK_S:
                self.fault(f"wait of {timeout} s took {time.monotonic() - began:.1f} s")
            return
        for slot, key in zip(room.slots, keys, strict=True):
            self.tiers[L1][slot].reshape(-1, 32)[:] = key
        if self.rng.random() < 0.1:
            self.client.abort("kv", room.token)
        else:
            self.client.commit("kv", room.token, keys)

    def buffers(self) -> None:
        """Buffers for the peer alone, or for itself too; some of what comes is given on."""
        size = int(self.rng.choice([4096, 70_000, 1 << 20]))
        with contextlib.suppress(PoolFull):
            stamp = int(self.rng.integers(1, 255))
            buffer = self.temp.alloc(size, timeout=0.2)
            buffer.numpy((size,), np.uint8)[:] = stamp
            readers = int(self.rng.integers(1, 3))
            ref = self.temp.publish(buffer, "uint8", (size,), readers)
            if readers == 2:
                self.shares.append((self.temp.adopt(ref), stamp))
            try:
                self.peer.send(bytes([stamp]) + encode_ref(ref))
            except OSError:
                with contextlib.suppress(DataError):
                    self.temp.retract(ref)
        with contextlib.suppress(OSError, StaleDescriptor):
            while message := self.peer.recv(512):
                share = self.temp.adopt(decode_ref(message[1:]))
                self.shares.append((share, message[0]))
                if self.rng.random() < 0.1 and select.select([], [self.peer], [], 0)[1]:
                    self.temp.forward(share)
                    self.peer.send(message)
        while len(self.shares) > 4:
            share, stamp = self.shares.pop(0)
            if not (np.asarray(share) == stamp).all():
                self.fault("wrong bytes in a TempBuffer")
            share.release()

    def run(self) -> None:
        while True:
            try:
                self.pages() if self.rng.random() < 0.7 else self.buffers()
            except StaleEpoch:
                self.shares.clear()
                self.leases.clear()
                self._map()
            except DataError as error:
                if error.code in ("internal", "bad-message", "bad-token"):
                    self.fault(str(error))


if __name__ == "__main__":
    Worker(sys.argv[1], int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))).run()
