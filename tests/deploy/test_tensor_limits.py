"""What one process may hold and give on of others' arrays, and what happens at its bounds: the event loop goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from omni_flow.control.runtime.tensors import TensorGone
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import Refused
from omni_flow.data.launch import start
from omni_flow.data.ledger import FORWARDS, HELD_ENTRIES
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.temp_client import TempClient
from omni_flow.deploy.tensors import ArenaTensors


@pytest.fixture
def manager() -> Iterator[tuple[int, str]]:
    """A memory manager of TempBuffers: (pid, address)."""
    with tempfile.TemporaryDirectory(prefix="omni") as folder:
        process = start(ServerConfig(path=f"{folder}/memory.sock", temp_bytes=16 << 20, huge=False))
        yield process.pid, f"{folder}/memory.sock"
        process.terminate()
        process.wait()


def test_a_share_is_found_for_as_many_arrays_as_were_released(manager: tuple[int, str]) -> None:
    async def body() -> None:
        tensors = ArenaTensors(manager[1], "reader")
        placed = tensors.place(np.arange(1000))
        assert placed is not None
        placed.publish(HELD_ENTRIES + 2)
        held = [tensors.take(placed.ref) for _ in range(HELD_ENTRIES)]
        with pytest.raises(
            TensorGone, match=f"reader can hold no more: this process holds {HELD_ENTRIES} shares of 1 "
        ):
            tensors.take(placed.ref)
        del held[:5]  # the loop has not told the manager
        assert (tensors.take(placed.ref).array(False) == np.arange(1000)).all()
        held.clear()
        tensors.close()

    asyncio.run(body())


def test_who_gives_on_more_than_the_manager_has_seen_copies_and_waits_for_nobody(manager: tuple[int, str]) -> None:
    pid, address = manager

    async def body() -> None:
        tensors = ArenaTensors(address, "forwarder")
        first = tensors.place(np.arange(1000))
        assert first is not None
        first.publish(1)
        array = tensors.take(first.ref).array(False)
        os.kill(pid, signal.SIGSTOP)
        try:
            given = []
            for _ in range(FORWARDS // 2):
                forward = tensors.place(array)
                assert forward is not None
                forward.publish(1)
                given.append(forward.ref)
            booked = [tensors.place(array) for _ in range(FORWARDS // 2)]
            copy = tensors.place(array)
            assert (tensors.forwarded, tensors.copied) == (FORWARDS, 2)
            assert copy is not None
            assert copy.ref.offset != first.ref.offset
            copy.publish(1)
            for one in booked:  # what never goes out keeps no room
                assert one is not None
                one.discard()
            again = tensors.place(array)
            assert again is not None
            again.publish(1)
            assert tensors.forwarded == FORWARDS + 1
            assert all((tensors.take(ref).array(False) == array).all() for ref in (*given, copy.ref, again.ref))
        finally:
            os.kill(pid, signal.SIGCONT)
        with MemoryManagerClient(address, role="viewer") as viewer:
            await asyncio.sleep(0)  # one turn, in which the loop tells the manager
            while viewer.stats()["temp_forwarded"] < FORWARDS // 2 + 1:
                pass
            assert viewer.check() == []
        tensors.close()

    asyncio.run(body())


def test_where_stores_are_not_seen_in_their_order_arrays_are_not_placed(
    manager: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only part of a machine of another kind that this one can have: what it is known by."""
    monkeypatch.setattr("omni_flow.data.temp_shares.ORDERED", False)
    monkeypatch.setattr("omni_flow.deploy.tensors.ORDERED", False)

    async def body() -> None:
        tensors = ArenaTensors(manager[1], "of another kind")
        assert tensors.place(np.arange(10_000)) is None
        assert tensors.empty(10_000).base is None
        with MemoryManagerClient(manager[1]) as client:
            with pytest.raises(Refused, match="x86-64"):
                TempClient(client)
            assert client.check() == []
            assert client.stats()["sessions"] == 1
        tensors.close()

    asyncio.run(body())
