"""The TempBuffer pool while its clients go on: between two steps of the server, and in its check."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from omni_flow.data.arena import Arena
from omni_flow.data.ledger import BLOCK, CELLS, LEDGER_BYTES, ROW, U32
from omni_flow.data.temp_account import TempAccount
from omni_flow.data.temp_buffers import TempBuffers
from omni_flow.data.temp_pool import TempPool
from omni_flow.data.temp_shares import Maps

MIB = 1 << 20


def pool_and_owner() -> tuple[TempPool, TempAccount, TempBuffers, Arena]:
    """A pool, the account of a client that has leased a slot, its buffers, and the table of slots."""
    arenas = [Arena.create(name, size, huge=False) for name, size in (("t", MIB), ("s", 4 * MIB), ("l", LEDGER_BYTES))]
    temp, slots, ledger = arenas
    table = slots.numpy(0, (MIB,), np.uint32)
    table[:] = U32
    table[::ROW] = 0
    pool = TempPool(MIB, 0, 0, 30.0, table.data)
    account = pool.open(1, 0, "owner")
    account.map(ledger.numpy(0, (LEDGER_BYTES // (4 * CELLS), CELLS), np.uint32))
    buffers = TempBuffers(Maps(temp, temp, slots, ledger), "n", direct=True)
    pool.lease(account, BLOCK, 1, 0.0, 0.0, lambda size, leased: buffers.fill(0, size, leased), pytest.fail)
    return pool, account, buffers, slots


def test_a_settled_slot_given_back_while_the_server_looks_who_holds_it_is_free_at_once() -> None:
    pool, account, buffers, _ = pool_and_owner()
    buffer = buffers.pop(BLOCK)
    assert buffer is not None
    ref = buffers.publish(buffer, "uint8", (BLOCK,))
    share = buffers.adopt(ref)
    pool.settle(account, [(ref.offset // BLOCK, ref.generation)], 0.0)
    look = pool.held_shares

    def done_before_the_look() -> dict[tuple[int, int], int]:
        share.release()
        return look()

    pool.held_shares = done_before_the_look  # type: ignore[method-assign]
    pool.tick(1.0)
    assert pool.free_bytes() == pool.capacity()
    assert pool.check_integrity() == []


def test_owners_that_go_on_meanwhile_are_no_fault_to_a_check() -> None:
    """A check looks at the table and at a ledger while the owner of the slot leases it anew, many times over."""
    pool, _, buffers, slots = pool_and_owner()
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
