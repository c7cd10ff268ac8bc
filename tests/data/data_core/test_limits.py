"""A server that stands still, and systems that refuse what is asked of them: nobody hangs, everybody is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_flow.data import arena
from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.arena import Arena, available_bytes
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import BadToken, CallTimeout, DataError, OutOfMemory, PoolFull, StaleEpoch, SystemRefusal
from omni_flow.data.handshake import naming_vector
from omni_flow.data.hostid import host_id
from omni_flow.data.link import UnixLink
from omni_flow.data.messages import Hello, Welcome
from omni_flow.data.protocol import ERROR, Failure, Op, encode
from omni_flow.data.temp_client import TempClient
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.names import Family, TensorSpec, WeightName
from omni_flow.data.zmq_link import ZmqLink

from .conftest import Make, Manager


@contextlib.contextmanager
def stopped(server: Manager) -> Iterator[None]:
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def no_more_descriptors(pid: int) -> Iterator[None]:
    """The process can open nothing more."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    least = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (least, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def left_over(server: Manager) -> Iterator[tuple[MemoryManagerClient, TempClient]]:
    """A client with slots of a server that has been killed and started anew since, of which it does not know yet."""
    with server.client() as client:
        temp = TempClient(client)
        temp.alloc(100)
        server.kill()
        server.again()
        yield client, temp


def without_end(act: Callable[[], None]) -> None:
    while True:
        act()


def until(reached: Callable[[], bool]) -> None:
    while not reached():
        pass


def test_a_server_that_stands_still_keeps_nobody_longer_than_the_timeout(manager: Make) -> None:
    server = manager(temp_bytes=1 << 20)
    links: list[UnixLink] = []
    with server.client(timeout=0.2) as client:
        temp = TempClient(client)
        with stopped(server):
            with pytest.raises(CallTimeout, match="takes no message"):
                without_end(temp.ring)
            with pytest.raises(CallTimeout, match="takes no connection"):
                without_end(lambda: links.append(UnixLink(server.path, 0.2)))
    for link in links:
        link.close()
    with server.client() as client:
        client.ping()


def test_buffers_that_could_not_be_mapped_at_a_new_server_are_mapped_when_they_are_needed(manager: Make) -> None:
    server = manager(temp_bytes=1 << 20)
    with left_over(server) as (client, temp):
        with no_more_descriptors(os.getpid()), pytest.raises((SystemRefusal, OutOfMemory)):
            client.ping()
        ref = temp.put(np.arange(4))
        with server.client() as other:
            assert TempClient(other).adopt(ref).numpy().tolist() == [0, 1, 2, 3]


def test_slots_of_a_server_that_is_gone_are_not_given_back_to_the_next(manager: Make) -> None:
    """The new one is short of room, and says so while this client begins to use it."""
    server = manager(temp_bytes=1 << 20)
    with left_over(server) as (client, _), server.client() as greedy:
        others = TempClient(greedy)
        others.alloc(1 << 20)
        real = client.arena

        def arena(name: str, *, write: bool = False) -> Arena:
            made = real(name, write=write)
            if name == "temp/ledger":
                with pytest.raises(PoolFull):
                    others.alloc(1, timeout=0)
            return made

        client.arena = arena  # type: ignore[method-assign]
        with pytest.raises(StaleEpoch):
            client.ping()
        client.ping()


def test_an_async_client_whose_owner_could_not_start_anew_still_hears_answers(manager: Make) -> None:
    server = manager()

    def refuses() -> None:
        raise BadToken("no room to map it anew")

    async def main() -> None:
        async with await AsyncMemoryManagerClient.connect(server.path, timeout=20) as client:
            client.session.on_stale.append(refuses)
            server.kill()
            server.again()
            with pytest.raises(BadToken):
                await client.ping()
            await client.ping()

    asyncio.run(main())


def test_an_async_client_that_is_closed_while_it_registers_anew_leaves_no_connection(manager: Make) -> None:
    server = manager()

    async def main() -> None:
        client = await AsyncMemoryManagerClient.connect(server.path, name="closed", timeout=20)
        server.kill()
        server.again()
        with stopped(server):
            call = asyncio.create_task(client.ping())
            await asyncio.sleep(0)  # the call finds out, and lets a thread register anew
            await asyncio.to_thread(until, lambda: not client.session.epoch)
            await client.close()
        with pytest.raises(DataError):
            await call

    asyncio.run(main())
    with server.client(role="viewer") as client:
        assert [row["name"] for row in client.inspect()] == [""]


def test_a_server_without_descriptors_refuses_the_weights_that_somebody_waited_to_load(manager: Make) -> None:
    server = manager()
    family = Family("m", "r")
    specs = [TensorSpec(WeightName(family=family, path=path, dtype="u8"), (9,)) for path in ("one", "two")]
    ended: list[DataError] = []

    def wait_for(spec: TensorSpec) -> None:
        with server.client(name="waits") as client, pytest.raises(DataError) as caught:
            WeightClient(client).get(spec, lambda _, out: None)
        ended.append(caught.value)

    waiters = [threading.Thread(target=wait_for, args=(spec,)) for spec in specs]
    with server.client() as client, server.client() as other, contextlib.ExitStack() as limit:

        def gives_up(_spec: TensorSpec, out: memoryview) -> None:
            for waiter in waiters:
                waiter.start()
            until(lambda: other.stats()["weight_waits"] == 2)
            limit.enter_context(no_more_descriptors(server.process.pid))
            raise BadToken("a loader that gives up")

        with pytest.raises(BadToken):
            WeightClient(client).get(specs, gives_up)
        for waiter in waiters:
            waiter.join()
        client.ping()
    assert "system" in [error.code for error in ended]  # the other had the descriptor of who gave up


@pytest.mark.parametrize("transport", ["ipc"])
def test_a_server_without_descriptors_refuses_a_client_that_it_cannot_watch_who_may_try_again(manager: Make) -> None:
    server = manager()
    link = ZmqLink(server.address)
    hello = encode(Op.HELLO, 0, 1, 0, Hello("client", "a", pid=os.getpid(), host=host_id(), vector=naming_vector()))
    link.send(encode(Op.PING, 0, 1, 0))
    assert link.receive(20) is not None  # refused, but connected
    with no_more_descriptors(server.process.pid):
        link.send(hello)
        answer = link.receive(20)
        assert answer is not None
        assert answer.flags & ERROR
        assert answer.body(Failure).code == SystemRefusal.code
    link.send(hello)
    answer = link.receive(20)
    assert answer is not None
    assert answer.body(Welcome).local
    link.close()


def test_memory_that_a_cgroup_keeps_files_in_counts_as_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_CGROUP", str(tmp_path))
    whole = available_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() == pytest.approx(whole, rel=0.5)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("990\n")
    (tmp_path / "memory.stat").write_text("anon 90\nfile 900\nshmem 200\ninactive_file 300\nactive_file 400\n")
    assert available_bytes() == 710
    (tmp_path / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    (tmp_path / "memory.current").write_text("1001\n")
    assert available_bytes() == 0
