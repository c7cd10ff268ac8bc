"""The check of the TempBuffer pool's books while clients go on."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from omni_flow.data.arena import Arena
from omni_flow.data.ledger import BLOCK, CELLS, LEDGER_BYTES
from omni_flow.data.temp_buffers import TempBuffers
from omni_flow.data.temp_pool import TempPool
from omni_flow.data.temp_shares import Maps

MIB = 1 << 20


def test_owners_that_go_on_meanwhile_are_no_fault_to_a_check() -> None:
    """A check looks at the table and at a ledger while the owner of the slot leases it anew, many times over."""
    arenas = [Arena.create(name, size, huge=False) for name, size in (("t", MIB), ("s", 4 * MIB), ("l", LEDGER_BYTES))]
    temp, slots, ledger = arenas
    pool = TempPool(MIB, 0, 0, 30.0, slots.numpy(0, (MIB,), np.uint32).data)
    account = pool.open(1, 0, "owner")
    account.map(ledger.numpy(0, (LEDGER_BYTES // (4 * CELLS), CELLS), np.uint32))
    buffers = TempBuffers(Maps(temp, temp, slots, ledger), "n", direct=True)
    pool.lease(account, BLOCK, 1, 0.0, 0.0, lambda size, leased: buffers.fill(0, size, leased), pytest.fail)
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            buffer = buffers.pop(BLOCK)
            assert buffer is not None
            buffers.adopt(buffers.publish(buffer, "uint8", (BLOCK,))).release()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as thread:
            owner = thread.submit(go_on)
            faults = [fault for _ in range(100_000) for fault in pool.check_integrity()]
            over.set()
            owner.result()
    finally:
        sys.setswitchinterval(before)
    assert faults == []
    slots.numpy(0, (MIB,), np.uint32)[0] += 2
    assert pool.check_integrity() == ["slot 0 has the wrong generation"]
