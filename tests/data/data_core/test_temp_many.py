"""Many clients: what one of them asks for costs as much as if it were alone."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import numpy as np

from omni_flow.data.arena import Arena
from omni_flow.data.ledger import BLOCK, CELLS, LEDGER_BYTES, ROW
from omni_flow.data.temp_account import TempAccount
from omni_flow.data.temp_pool import TempPool

from .temp_rig import MIB

FEW, MANY = 4, 400


def pool() -> TempPool:
    table = Arena.create("table", (16 * MIB // BLOCK + 1) * ROW * 4, huge=False)
    return TempPool(16 * MIB, 0, 0, 30.0, table.numpy(0, (table.size // 4,), np.uint32).data)


def enter(pool: TempPool, session: int) -> TempAccount:
    """A client with a ledger and a slot."""
    account = pool.open(session, 0, "")
    account.map(np.zeros((LEDGER_BYTES // (4 * CELLS), CELLS), np.uint32))
    pool.lease(account, BLOCK, 1, 0.0, 0.0, lambda size, leased: None, lambda error: None)
    assert len(account.owned) == 1
    return account


def steps(act: Callable[[], object]) -> int:
    """How many functions are called."""
    count = 0

    def called(frame: FrameType, event: str, what: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def costs(others: int) -> tuple[int, int]:
    """Steps of a tick, and of the end of one client, while so many others have a slot each."""
    busy = pool()
    for session in range(others):
        enter(busy, session)
    leaving = enter(busy, others).session
    tick = steps(lambda: busy.tick(1.0))
    end = steps(lambda: list(busy.close(leaving, 1.0)))
    assert busy.check_integrity() == []
    assert len(busy.slots) == others
    return tick, end


def test_a_tick_and_the_end_of_a_client_cost_no_more_for_many_others() -> None:
    (tick, end), (tick_of_many, end_of_many) = costs(FEW), costs(MANY)
    assert tick_of_many == tick
    assert end_of_many < end + FEW  # its slot joins other free ones


def test_clients_without_buffers_cost_the_pool_little() -> None:
    busy = pool()
    tracemalloc.start()
    for session in range(MANY):
        busy.open(session, 0, "")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < MANY * 4096
