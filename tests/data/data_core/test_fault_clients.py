"""What clients do wrong, or have done to them: they stop, end, run out of descriptors, die by the dozen."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError, Disconnected, JobFailed, NoMover, PoolFull
from omni_flow.data.ledger import BLOCK, CELLS, HELD, OWNED, RELEASED, TOP
from omni_flow.data.messages import L1, L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.temp_client import TempClient, encode_ref

from .conftest import TRANSPORTS, Make, Puppet, keys, poll_timeout, store

MIB = 1 << 20
TWO_TIERS = PoolSpec(name="kv", page_bytes=64, l1_pages=64, l2_pages=64, staging=4)
Dolls = Callable[[str], Puppet]


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mappings(pid: int) -> int:
    """How many mappings of memory files a process has."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:omni")


def test_clients_killed_one_after_another_leave_the_server_as_it_was(manager: Make, puppet: Dolls) -> None:
    server = manager(temp_bytes=4 * MIB)
    pid = server.process.pid
    with server.client() as client:
        before = descriptors(pid), mappings(pid)
        for _ in range(6):
            doll = puppet(server.path)
            doll.do("a = c.arena('kv/l1', write=True); room = c.reserve('kv', 100); t = TempClient(c)")
            doll.do("b = t.alloc(1 << 20); r = t.put(np.zeros(1000)).offset")
            assert descriptors(pid) > before[0]
            doll.kill()
            while (stats := client.stats())["sessions"] > 1 or stats["reclaims_running"]:
                client.wait_end(0.01)
            assert (descriptors(pid), mappings(pid)) == before
        client.abort("kv", client.reserve("kv", 256).token)


def test_a_client_that_says_nothing_is_never_given_up(manager: Make, puppet: Dolls) -> None:
    server = manager()
    doll = puppet(server.path)
    names = keys(100)
    with server.client() as client:
        store(client, names)
        doll.do(f"m = c.lookup('kv', np.frombuffer({names.tobytes()!r}, np.uint8).reshape(-1, 32))")
        doll.process.send_signal(signal.SIGSTOP)
        while poll_timeout(server.process.pid) != -1:
            client.wait_end(0.01)
        for _ in range(4):
            store(client, keys(100))
        assert client.probe("kv", names).tolist() == [L1] * 100
        doll.kill()
        server.settle()
        client.abort("kv", client.reserve("kv", 256).token)


def test_asking_whether_pages_are_there_keeps_none(manager: Make) -> None:
    with manager().client() as client:
        old = keys(256)
        store(client, old)
        for _ in range(20):
            assert client.probe("kv", old).all()
            assert client.lookup("kv", old, pin=False).pages == 256
        room = client.reserve("kv", 256)
        assert not client.probe("kv", old).any()
        client.abort("kv", room.token)


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_reader_that_ends_takes_no_memory_of_others_along(end: str, manager: Make, puppet: Dolls) -> None:
    server = manager(temp_bytes=MIB)
    with server.client() as client:
        names = keys(4)
        room = client.reserve("kv", 4)
        client.arena("kv/l1", write=True).pages(64, 256)[room.slots] = names[:, :1]
        client.commit("kv", room.token, names)
        temp = TempClient(client)
        ref = temp.put(np.full(1000, 7, np.uint8), consumers=2)
        doll = puppet(server.path)
        doll.do(f"s = TempClient(c).adopt(decode_ref({encode_ref(ref)!r})); a = c.arena('kv/l1')")
        if end == "kill":
            doll.kill()
        else:
            doll.process.communicate(timeout=60)
        server.settle()
        with server.client() as later:
            found = later.lookup("kv", names)
            assert (later.arena("kv/l1").pages(64, 256)[found.slots] == names[:, :1]).all()
        assert (temp.adopt(ref).numpy() == 7).all()


def test_lint_refuses_named_segments_of_shared_memory_and_their_tracker() -> None:
    root = Path(__file__).parents[3]
    code = "from multiprocessing import resource_tracker, shared_memory\nprint(resource_tracker, shared_memory)\n"
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise", "-"]
    run = subprocess.run(
        [*command, "--stdin-filename", "omni_flow/data/x.py"],
        cwd=root,
        input=code,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stdout.count("TID251") == 2


def test_any_number_of_buffers_costs_a_client_no_descriptor_and_no_mapping(manager: Make, puppet: Dolls) -> None:
    server = manager(temp_bytes=4 * MIB)
    with server.client() as client:
        temp = TempClient(client)
        refs = [encode_ref(temp.put(np.full(100, n, np.uint8))) for n in range(200)]
        doll = puppet(server.path)
        doll.do(f"t = TempClient(c); held = [t.adopt(decode_ref({refs[0]!r})).numpy()]")
        before = descriptors(doll.process.pid), mappings(doll.process.pid)
        doll.do(f"held += [t.adopt(decode_ref(raw)).numpy() for raw in {refs[1:]!r}]")
        assert doll.do("r = [int(a[99]) for a in held]") == repr(list(range(200)))
        assert (descriptors(doll.process.pid), mappings(doll.process.pid)) == before


@pytest.mark.parametrize("room", [0, 1])
def test_a_client_out_of_descriptors_is_told_so_and_goes_on_when_there_are_some(
    room: int, manager: Make, puppet: Dolls
) -> None:
    server = manager(temp_bytes=MIB)
    doll = puppet(server.path)
    pid = doll.process.pid
    before = descriptors(pid)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (before + room, 4096))
    for call in ("c.arena('kv/l1')", "TempClient(c)", "c.side_arena('kv/l1')"):
        with pytest.raises(DataError, match=r"! (SystemRefusal|OutOfMemory) "):
            doll.do(call)
        assert descriptors(pid) == before
    assert doll.do("room = c.reserve('kv', 3); r = len(room.slots)") == "3"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))
    assert doll.do("r = c.arena('kv/l1').size") == str(256 * 64)
    doll.do("r = TempClient(c).put(np.zeros(10)).offset")


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_liar_that_gives_back_what_others_hold_takes_it_from_nobody(end: str, manager: Make) -> None:
    """In its own ledger it may write what it likes: here shares of others, released, or held when it ends."""
    server = manager(pools=(), temp_bytes=MIB)
    with server.client() as one, server.client() as two, server.client() as three:
        out, into, lying = TempClient(one), TempClient(two), TempClient(three)
        ref = out.put(np.full(MIB // 4, 7, np.uint8))
        share = into.adopt(ref)
        mine = share.numpy()
        cells = np.frombuffer(lying.buffers._cells, np.uint32).reshape(-1, CELLS)
        cells[OWNED] = [RELEASED if end == "flush" else HELD, 1, ref.offset // BLOCK, ref.generation]
        lying.buffers._cells[TOP] = 1
        if end == "flush":
            lying.flush()
        else:
            three.close()
            server.settle()
        filled = [out.put(np.full(MIB // 4, 9, np.uint8)) for _ in range(3)]
        with pytest.raises(PoolFull):
            out.put(np.full(MIB // 4, 9, np.uint8), timeout=0.05)
        assert share.valid()
        assert (mine == 7).all()
        del mine
        share.release()
        into.flush()
        for one_more in filled:
            into.adopt(one_more).release()
        into.flush()
        out.trim()
        assert one.stats()["temp_free_bytes"] == MIB
        assert one.stats()["temp_bad_releases"] >= 1


TEMP_STEPS = (
    "t = TempClient(c)",
    "b = t.alloc(1 << 18)",
    "ref = t.publish(b, 'uint8', (1 << 18,), consumers=2)",
    "s = t.adopt(ref)",
    "t.forward(s)",
    "s.release()",
    "t.flush()",
    "t.retract(ref)",
    "t.settle([ref])",
    "t.trim()",
)


@pytest.mark.parametrize("died_after", range(len(TEMP_STEPS) + 1))
def test_a_client_killed_between_two_steps_of_a_buffers_life_leaves_nothing(
    died_after: int, manager: Make, puppet: Dolls
) -> None:
    server = manager(pools=(), temp_bytes=MIB, orphan_s=0.2)
    doll = puppet(server.path)
    for step in TEMP_STEPS[:died_after]:
        doll.do(step)
    doll.kill()
    server.settle()
    with server.client() as client:
        assert len(TempClient(client).alloc(MIB, timeout=20).view()) == MIB
        assert client.check() == []


def test_calls_in_flight_end_with_their_client_and_no_session_takes_its_place(manager: Make) -> None:
    server = manager()

    async def main() -> None:
        client = await AsyncMemoryManagerClient.connect(server.path)
        await client.reserve("kv", 256)
        waiting = [asyncio.create_task(client.reserve("kv", 1, timeout=60)) for _ in range(3)]
        await client.ping()
        await client.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in ended] == [Disconnected] * 3
        with pytest.raises(Disconnected, match="closed"):
            await client.ping()

    asyncio.run(main())
    server.settle()
    with server.client(role="viewer") as viewer:
        assert viewer.stats()["sessions"] == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_closed_client_stays_closed(manager: Make) -> None:
    server = manager()
    client = server.client()
    client.reserve("kv", 256)
    client.close()
    for _ in range(2):
        with pytest.raises(Disconnected, match="closed"):
            client.ping()
    server.settle()
    with server.client() as other:
        assert len(other.inspect()) == 1
        other.reserve("kv", 256, timeout=20)


def fetching(client: MemoryManagerClient, names: np.ndarray, tier: int) -> Future[list[int]]:
    """Fetch in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(lambda: client.fetch("kv", names, tier=tier, timeout=60).tolist())
    pool.shutdown(wait=False)
    return future


def test_a_page_is_found_in_a_tier_only_when_its_copy_is_whole(manager: Make) -> None:
    server = manager(pools=(TWO_TIERS,), movers=(("copy",),))
    with server.client() as client, server.client() as asking:
        while not client.stats()["job_movers"]:
            client.wait_end(0.01)
        mover = next(row["pid"] for row in client.inspect() if row["role"] == "mover")
        names = keys(4)
        room = client.reserve("kv", 4)
        client.arena("kv/l1", write=True).pages(64, 64)[room.slots] = names[:, :1]
        client.commit("kv", room.token, names)
        os.kill(mover, signal.SIGSTOP)
        answer = fetching(asking, names, L2)
        while not client.stats()["pool_jobs_running/kv"]:
            client.ping()
        assert client.probe("kv", names).tolist() == [L1] * 4
        assert client.lookup("kv", names, tiers=L2, pin=False).pages == 0
        assert client.drop("kv", names).tolist() == [0] * 4
        os.kill(mover, signal.SIGCONT)
        assert answer.result(60) == [1] * 4
        found = client.lookup("kv", names, tiers=L2)
        assert (client.arena("kv/l2").pages(64, 64)[found.slots] == names[:, :1]).all()
        client.unpin("kv", found.lease)


def test_a_fetch_whose_mover_dies_half_way_holds_nothing_afterwards(manager: Make) -> None:
    server = manager(pools=(TWO_TIERS,), movers=(("copy",),))
    with server.client() as client, server.client() as asking:
        names = keys(30)
        store(client, names)
        for _ in range(3):
            while not client.stats()["job_movers"]:
                client.wait_end(0.01)
            mover = next(row["pid"] for row in client.inspect() if row["role"] == "mover")
            os.kill(mover, signal.SIGSTOP)
            answer = fetching(asking, names, L2)
            while not client.stats()["pool_jobs_running/kv"]:
                client.ping()
            os.kill(mover, signal.SIGKILL)
            assert isinstance(answer.exception(60), NoMover | JobFailed | None)
            while client.stats()["pool_jobs_orphaned/kv"] or client.stats()["pool_jobs_running/kv"]:
                client.wait_end(0.01)
            stats = client.stats()
            assert (stats["pool_l1_pinned/kv"], stats["pool_l2_pinned/kv"]) == (0, 0)
            assert client.check() == []
            client.drop("kv", names)
            store(client, names)


def test_the_end_of_a_fetch_is_told_to_its_asker_and_holds_up_no_other_call(manager: Make) -> None:
    server = manager(pools=(TWO_TIERS,), movers=(("copy",),))

    async def main() -> None:
        async with await AsyncMemoryManagerClient.connect(server.path) as client:
            with server.client() as writer:
                while not writer.stats()["job_movers"]:
                    writer.wait_end(0.01)
                store(writer, names := keys(4))
                mover = next(row["pid"] for row in writer.inspect() if row["role"] == "mover")
            os.kill(mover, signal.SIGSTOP)
            fetch = asyncio.create_task(client.fetch("kv", names, tier=L2, timeout=60))
            for _ in range(20):
                assert (await client.lookup("kv", names, pin=False)).pages == 4
                room = await client.reserve("kv", 8)
                await client.abort("kv", room.token)
            assert not fetch.done()
            os.kill(mover, signal.SIGCONT)
            assert (await fetch).all()

    asyncio.run(main())


def test_ranks_carry_out_what_one_of_them_was_told_whatever_others_do(manager: Make, puppet: Dolls) -> None:
    """Rank 0 asks; the others have only its answer and their own mapping, in processes of their own."""
    server = manager()
    with server.client(role="engine", quotas={"kv": 64}) as decider, server.client() as crowd:
        ranks = [puppet(server.path) for _ in range(2)]
        for rank in ranks:
            rank.do("pages = c.arena('kv/l1', write=True).pages(64, 256)")
        names = keys(16)
        room = decider.reserve("kv", 16)
        for number, rank in enumerate(ranks):
            rank.do(f"pages[{room.slots.tolist()}, {32 * number}:{32 * number + 32}] = {number + 1}")
            assert decider.probe("kv", names).tolist() == [0] * 16
        decider.commit("kv", room.token, names)
        plan = decider.lookup("kv", names)
        assert plan.pages == 16
        for _ in range(5):
            store(crowd, keys(150))
        for number, rank in enumerate(ranks):
            seen = rank.do(
                f"r = pages[{plan.slots.tolist()}, {32 * number}:{32 * number + 32}]; r = (r.min(), r.max())"
            )
            assert seen.count(str(number + 1)) == 2
        decider.unpin("kv", plan.lease)
