"""Death, lies and restarts, against real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import resource
import select
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import Disconnected, Refused, StaleEpoch
from omni_flow.data.launch import default_services, start
from omni_flow.data.link import UnixLink
from omni_flow.data.messages import ArenaRef
from omni_flow.data.pool_pins import SLICE_PAGES
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.protocol import Op, encode
from omni_flow.data.server import Server
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.unix_front import UnixFront

from .conftest import TRANSPORTS, Make, Manager, Puppet, failure, hello, keys, store

STEPS = (
    "names = np.random.default_rng(5).integers(0, 256, (32, 32), np.uint8)",
    "room = c.reserve('kv', 40)",
    "r = c.commit('kv', room.token, names, positions=range(32), pin=True)",
    "r = c.lookup('kv', names)",
    "other = c.reserve('kv', 8)",
    "c.abort('kv', other.token, positions=[0, 1])",
    "c.unpin('kv', r.lease, positions=[3])",
)


@pytest.mark.parametrize("died_after", range(len(STEPS) + 1))
def test_a_client_killed_between_two_steps_leaves_nothing(
    died_after: int, manager: Make, puppet: Callable[[str], Puppet]
) -> None:
    server = manager()
    doll = puppet(server.path)
    for step in STEPS[:died_after]:
        doll.do(step)
    doll.kill()
    with server.client() as client:
        room = client.reserve("kv", 256, timeout=10)
        client.abort("kv", room.token)
        assert client.check() == []


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_over_zmq_a_killed_client_is_noticed_too(manager: Make, puppet: Callable[[str], Puppet]) -> None:
    server = manager()
    doll = puppet(server.address)
    doll.do("r = c.reserve('kv', 200).token")
    doll.kill()
    with server.client() as client:
        client.reserve("kv", 256, timeout=10)


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_over_zmq_a_restart_is_noticed_by_the_next_call(manager: Make) -> None:
    server = manager()
    with server.client(timeout=20) as client:
        store(client, keys(4))
        server.kill()
        server.again()
        with pytest.raises(StaleEpoch):
            store(client, keys(4))
        store(client, keys(4))


def test_a_killed_waiter_is_not_served(manager: Make, puppet: Callable[[str], Puppet]) -> None:
    server = manager()
    with server.client() as client:
        room = client.reserve("kv", 256)
        doll = puppet(server.path)
        doll.send("r = c.reserve('kv', 100, timeout=60)")
        while client.stats()["pool_l1_waiting/kv"] != 1:
            pass
        doll.kill()
        while client.stats()["pool_l1_waiting/kv"]:
            pass
        client.abort("kv", room.token)
        client.reserve("kv", 256)


def test_a_restarted_server_is_noticed_by_the_next_call(manager: Make) -> None:
    server = manager()
    with server.client() as client:
        store(client, keys(4))
        room = client.reserve("kv", 1)
        arena = client.arena("kv/l1", write=True)
        epoch = client.epoch
        server.kill()
        with pytest.raises(Disconnected):
            client.ping()
        server.again()
        with pytest.raises(StaleEpoch):
            client.commit("kv", room.token, keys(1))
        assert client.epoch != epoch
        assert client.arena("kv/l1", write=True) is not arena
        store(client, keys(4))


def test_a_restart_between_two_calls_is_noticed(manager: Make) -> None:
    server = manager()
    with server.client() as client:
        server.kill()
        server.again()
        with pytest.raises(StaleEpoch):
            client.lookup("kv", keys(1))
        client.ping()


def test_an_async_client_registers_again_once_for_all_its_calls(manager: Make) -> None:
    server = manager()

    async def main() -> None:
        async with await AsyncMemoryManagerClient.connect(server.path) as client:
            await client.reserve("kv", 256)
            waiting = [asyncio.create_task(client.reserve("kv", 1, timeout=30)) for _ in range(5)]
            await client.ping()
            server.kill()
            server.again()
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(one) for one in ended] == [StaleEpoch] * 5
            await client.reserve("kv", 256)
            assert (await client.stats())["sessions"] == 1

    asyncio.run(main())


def test_a_server_killed_under_load_comes_back_for_everyone(manager: Make) -> None:
    server = manager()
    stop = threading.Event()
    rounds = [0] * 4
    faults: list[BaseException] = []

    def work(at: int) -> None:
        client = server.client()
        while not stop.is_set():
            try:
                store(client, keys(8))
                rounds[at] += 1
            except (StaleEpoch, Disconnected):
                continue
            except BaseException as error:
                faults.append(error)
                return
        client.close()

    def let_each_do(n: int) -> None:
        before = list(rounds)
        with server.client(role="viewer") as client:
            while any(now < was + n for now, was in zip(rounds, before, strict=True)):
                assert faults == []
                client.wait_end(0.01)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        let_each_do(5)
        server.kill()
        server.again()
    let_each_do(5)
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []


def test_nothing_is_left_after_sigkill_of_everything(manager: Make, puppet: Callable[[str], Puppet]) -> None:
    server = manager(temp_bytes=1 << 20)
    doll = puppet(server.path)
    doll.do("t = TempClient(c); r = t.put(np.zeros(1000)).offset")
    for pid in (server.process.pid, doll.process.pid):
        opened = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "memfd:omni-temp" in mapped
        assert "/dev/shm/" not in mapped + " ".join(opened)
    server.kill()
    doll.kill()
    server.again()
    with server.client() as client:
        store(client, keys(4))


def test_a_read_only_mapping_cannot_be_written(manager: Make) -> None:
    server = manager()
    program = (
        "import sys, ctypes; from omni_flow.data.client import MemoryManagerClient as M\n"
        "a = M(sys.argv[1], read_only=True).arena('kv/l1'); assert not a.array.flags.writeable\n"
        "ctypes.memset(a.address, 1, 1)"
    )
    ended = subprocess.run([sys.executable, "-c", program, server.path], check=False, timeout=60)
    assert ended.returncode == -11


def test_a_descriptor_for_readers_cannot_be_mapped_for_writing(manager: Make) -> None:
    with manager().client() as client:
        reply = client.call(Op.ARENA, ArenaRef("kv/l1", False))
        with pytest.raises(PermissionError):
            mmap.mmap(reply.fds[0], 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(reply.fds[0])


def test_side_connections_need_the_secret_of_the_session(manager: Make) -> None:
    server = manager()
    with server.client() as client:
        link = UnixLink(server.path)
        for number, secret in ((client.welcome.session, 1), (999, client.welcome.secret), (0, 0)):
            link.send(encode(Op.ARENA, 0, 3, 0, ArenaRef("kv/l1", True, number, secret)))
            assert failure(link) == Refused.code
        link.close()


def test_a_large_reclaim_lets_others_through(manager: Make, puppet: Callable[[str], Puppet]) -> None:
    server = manager(pools=(PoolSpec(name="kv", page_bytes=16, l1_pages=40_000),))
    doll = puppet(server.path)
    doll.do("names = np.random.default_rng(1).integers(0, 256, (32000, 32), np.uint8)")
    doll.do("for i in range(0, 32000, 500): c.commit('kv', c.reserve('kv', 500).token, names[i:i+500], pin=True)")
    doll.do("for i in range(15): c.reserve('kv', 500)")
    with server.client() as client:
        doll.kill()
        while client.stats()["reclaims_running"] or client.stats()["sessions_closed"] < 1:
            client.ping()
        assert client.stats()["pool_reclaimed/kv"] == 39_500
        assert client.check() == []
        room = client.reserve("kv", 4096, timeout=5)
        client.abort("kv", room.token)
    told = [json.loads(line) for line in server.log.splitlines() if "reclaimed session" in line]
    (line,) = [line for line in told if line["client"] == "puppet"]
    assert (line["pid"], line["role"]) == (doll.process.pid, "client")
    assert line["freed"] == {"kv": {"reserved": 7_500, "pinned": 32_000}}
    assert line["slices"] > 39_500 // (2 * SLICE_PAGES)


def test_a_foreign_user_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    poll = select.epoll()
    told: list[Exception] = []
    ended: list[object] = []

    class Stranger:
        def refuse(self, op: int, request: int, error: Exception) -> None:
            told.append(error)

    others = frozenset({os.getuid() + 1})
    watch: dict[int, Callable[[int], None]] = {}
    front = UnixFront(f"{tmp_path}/s", poll, watch, others, lambda *_: Stranger(), lambda *_: None, ended.append)  # type: ignore[arg-type]
    front.open()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(f"{tmp_path}/s")
    for fd, events in poll.poll(5):
        watch[fd](events)
    assert isinstance(told[0], Refused)
    assert len(ended) == 1
    assert sock.recv(10) == b""
    sock.close()
    front.close()
    poll.close()


def test_two_servers_never_share_a_path(manager: Make) -> None:
    server = manager()
    with pytest.raises(Disconnected, match="already serves"):
        Manager(server.config)


def test_an_open_directory_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, stat.S_IRWXU | stat.S_IWOTH)
    with pytest.raises(Disconnected, match="0700"):
        start(ServerConfig(path=f"{tmp_path}/s"))


def test_memory_that_is_not_there_is_refused_at_start_with_the_number(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    pool = PoolSpec(name="kv", page_bytes=1 << 40, l1_pages=1 << 10)
    with pytest.raises(Disconnected, match=str(1 << 50)):
        start(ServerConfig(path=f"{tmp_path}/s", pools=(pool,)))


def test_a_server_told_to_end_before_it_runs_does_not_run(tmp_path: Path) -> None:
    server = Server(ServerConfig(path=f"{tmp_path}/s", huge=False), default_services)
    server.stop()
    server.run()
    assert not Path(f"{tmp_path}/s").exists()


def test_zmq_beyond_this_machine_needs_a_key(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    with pytest.raises(Disconnected, match="shared key"):
        start(ServerConfig(path=f"{tmp_path}/s", endpoints=("tcp://0.0.0.0:0",)))


def test_a_server_out_of_descriptors_goes_on(manager: Make) -> None:
    server = manager()
    pid = server.process.pid
    with server.client() as client:
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, 4096))
        links = []
        for _ in range(12):
            with contextlib.suppress(Disconnected):
                links.append(UnixLink(server.path))
        client.ping()
        store(client, keys(4))
        with pytest.raises(Disconnected):
            links[-1].receive(20)
        for link in links:
            link.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))
        client.ping()
    with server.client() as client:
        client.ping()


def test_descriptors_nobody_asked_for_are_closed(manager: Make) -> None:
    server = manager()
    link = UnixLink(server.path)
    epoch = hello(link)
    folder = f"/proc/{server.process.pid}/fd"
    before = len(os.listdir(folder))
    for _ in range(5):
        with open("/dev/null", "rb") as file:
            link.send(encode(Op.PING, 0, 4, epoch), [file.fileno()] * 20)
        assert link.receive(10) is not None
    link.send(encode(Op.PING, 0, 5, epoch))
    assert link.receive(10) is not None
    assert len(os.listdir(folder)) == before
    link.close()
