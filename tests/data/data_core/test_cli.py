"""`omni-flow memory …` and the metrics against a running manager."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from omni_flow.data.cli import memory_app, parse_pool, parse_size
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import Disconnected
from omni_flow.data.launch import start
from omni_flow.data.messages import PoolInfo
from omni_flow.data.metrics import registry_of
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.transfer.arena_ids import host_tiers
from omni_flow.data.transfer.client import TransferClient

from .conftest import Make, keys, store

RUN = CliRunner()


def test_inspect_top_check_and_bench_answer_in_json(manager: Make) -> None:
    server = manager(temp_bytes=1 << 20)
    with server.client(name="someone") as client:
        store(client, keys(5), pin=True)
        seen = json.loads(RUN.invoke(memory_app, ["inspect", "-a", server.path, "--json"]).stdout)
        assert [row["held"]["kv"] for row in seen["sessions"] if row["name"] == "someone"] == [[0, 5]]
        figures = json.loads(RUN.invoke(memory_app, ["top", "-a", server.path, "--json"]).stdout)
        assert figures["pool_stored/kv"] == 5
        assert json.loads(RUN.invoke(memory_app, ["check", "-a", server.path, "--json"]).stdout) == []
        speed = json.loads(RUN.invoke(memory_app, ["bench", "-a", server.path, "--json"]).stdout)
        assert set(speed) == {"ping_us", "probe_one_us", "probe_512_us", "temp_cycle_us"}


@pytest.mark.parametrize("command", ["inspect", "top", "check", "bench"])
def test_without_a_manager_the_commands_say_so(command: str) -> None:
    for address in ("/nowhere/memory.sock", __file__, "/nowhere/" + 200 * "x", "nonsense://x", "tcp://", "tcp://x"):
        result = RUN.invoke(memory_app, [command, "-a", address])
        assert isinstance(result.exception, SystemExit), address
        assert result.exit_code == 1
        assert address in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_manager_that_ends_under_top_is_said_in_a_line(manager: Make) -> None:
    server = manager()
    command = [sys.executable, "-m", "omni_flow.data.cli", "top", "-a", server.path, "--interval", "100"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as top:
        with server.client() as client:
            while "cli" not in [row["name"] for row in client.inspect()]:
                assert not client.wait_end(0.02)
        server.kill()
        _, said = top.communicate(timeout=60)
    assert top.returncode == 1
    assert "memory manager" in said
    assert said.count("\n") == 1


def test_names_are_shown_as_they_are(manager: Make) -> None:
    server = manager()
    with server.client(name="[/x] [red]a\x1b[2J"):
        shown = RUN.invoke(memory_app, ["inspect", "-a", server.path], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert "[/x] [red]a\N{REPLACEMENT CHARACTER}[2J" in shown.stdout


def test_metrics_carry_the_pool_as_a_label(manager: Make) -> None:
    with manager().client() as client:
        store(client, keys(7))
        client.lookup("kv", keys(2))
        registry = registry_of(client)
        assert registry.get_sample_value("omni_data_pool_stored_total", {"pool": "kv"}) == 7
        assert registry.get_sample_value("omni_data_pool_misses_total", {"pool": "kv"}) == 2
        assert registry.get_sample_value("omni_data_pool_l1_free", {"pool": "kv"}) == 249
        assert registry.get_sample_value("omni_data_pool_l1_bytes", {"pool": "kv"}) == 7 * 64
        assert registry.get_sample_value("omni_data_up") == 1


def test_serve_runs_until_sigterm_and_exports_metrics(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = str(tmp_path / "m.sock")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "omni_flow.data.cli", "serve", "--path", path, "--metrics-port", str(port)]
    pool = ["--pool", "name=kv,page=4K,l1=64,l2=64,policy=lru", "--temp", "1M"]
    with subprocess.Popen([*command, *pool], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "memory manager ready"
        with MemoryManagerClient(path, name="waits") as client:
            while "metrics" not in [session["name"] for session in client.inspect()]:
                assert not client.wait_end(0.02)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        assert 'omni_data_pool_l1_slots{pool="kv"} 64.0' in page
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    with pytest.raises(Disconnected):
        MemoryManagerClient(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_one_command_gives_a_node_with_all_tiers_and_its_transfer_process(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    key = tmp_path / "key"
    key.write_text("a secret of both nodes, long enough")
    ports = {"first": free_port(), "second": free_port()}

    def serve(name: str, peer: str) -> tuple[subprocess.Popen[bytes], MemoryManagerClient]:
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        (folder / "ssd").mkdir()
        path = str(folder / "m.sock")
        command = [sys.executable, "-m", "omni_flow.data.cli", "serve", "--path", path, "--temp", "0"]
        command += ["--pool", "name=kv,page=4K,l1=8,l2=32", "--ssd", str(folder / "ssd"), "--ssd-bytes", "16M"]
        command += ["--node", name, "--control", f"tcp://127.0.0.1:{ports[name]}", "--key-file", str(key)]
        command += ["--peers", f"tcp://127.0.0.1:{ports[peer]}"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "memory manager ready"
        return process, MemoryManagerClient(path, name="test")

    (one, first), (two, second) = serve("first", "second"), serve("second", "first")
    with one, two, first, second:
        for client in (first, second):
            while client.stats()["job_movers"] < 3 or not client.stats()["pool_l3_on/kv"]:
                assert not client.wait_end(0.02)
        names = keys(100)
        pages = first.arena("kv/l1", write=True).pages(4096, 8)
        for name in names:
            room = first.reserve("kv", 1, timeout=10)
            pages[room.slots] = name[0]
            first.commit("kv", room.token, name[None])
        tiers = first.probe("kv", names)
        assert {1, 2, 4} <= {int(bit) for bit in (1, 2, 4) if (tiers & bit).any()}
        some = names[[int((tiers == 4).argmax()), -1]]
        transfer = TransferClient(second)
        while not transfer.nodes():
            assert not second.wait_end(0.02)
        assert transfer.pull("kv", some, "first").all()
        found = second.lookup("kv", some)
        below = second.arena("kv/l2").pages(4096, 32)
        assert [below[slot].tolist() for slot in found.slots] == [[int(name[0])] * 4096 for name in some]
        for process in (one, two):
            process.terminate()
            assert process.wait(20) == 0


def test_half_of_an_option_is_refused_with_what_is_missing() -> None:
    pool = ["--pool", "name=kv,page=4K,l1=8,l2=8"]
    for options, lack in (
        ([*pool, "--ssd", "/nowhere"], "--ssd-bytes"),
        (["--ssd", "/nowhere", "--ssd-bytes", "1G"], "L2"),
        ([*pool, "--peers", "tcp://127.0.0.1:1"], "--node"),
        (["--pool", "name=kv,page=4K,l1=8,size=9"], "size"),
    ):
        result = RUN.invoke(memory_app, ["serve", *options])
        assert result.exit_code == 2
        assert lack in result.output


DEEP = ("--pool", "name=kv,page=4K,l1=8,l2=8")


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--pool", "name=kv,page=4K,l1=8,policy=mru"], 1, "mru"),
        (["--pool", "name=kv,page=infK,l1=8"], 2, "infK"),
        (["--pool", "name=kv,page=4K,l1=8,l2=8", "--ssd", "/nowhere", "--ssd-bytes", "-1G"], 2, "-1G"),
        (["--pool", "name=kv,page=4K,l1=8,l2=8", "--ssd", "/nowhere", "--ssd-bytes", "1M"], 2, "1M"),
        (["--pool", "name=kv,page=2M,l1=8,l2=8", "--ssd", "/nowhere", "--ssd-bytes", "8M"], 2, "8M"),
        ([*DEEP, "--ssd", f"{__file__}/ssd", "--ssd-bytes", "16M"], 1, "ssd can't be used: Not a directory; name one"),
        ([*DEEP, "--ssd", "/proc/nowhere/ssd", "--ssd-bytes", "16M"], 1, "/proc/nowhere/ssd"),
        (["--endpoint", "nonsense"], 1, "nonsense"),
        (["--endpoint", "tcp://127.0.0.1:99999"], 1, "127.0.0.1:99999"),
        (["--endpoint", "ipc:///proc/nowhere/zmq"], 1, "/proc/nowhere/zmq"),
        (["--path", "/proc/nowhere/m.sock"], 1, "can't serve at /proc/nowhere/m.sock: No such file or directory"),
        (["--path", f"{__file__}/m.sock"], 1, "can't serve at"),
        (["--path", 70 * "\N{SNOWMAN}" + "/m.sock"], 1, "at most 107 bytes"),
        (["--log-level", "LOUD"], 2, "LOUD"),
        (["--metrics-port", "-1"], 2, "metrics-port"),
        ([*DEEP, "--node", "a", "--control", "nonsense"], 1, "nonsense"),
        ([*DEEP, "--node", "a", "--control", "tcp://0.0.0.0:1"], 1, "can be reached from elsewhere"),
        ([*DEEP, "--node", "a", "--peers", "nonsense"], 1, "nonsense"),
        ([*DEEP, "--node", "a", "--key-file", "/nowhere/key"], 1, "/nowhere/key"),
        ([*DEEP, "--node", "a", "--key-file", "/dev/null"], 1, "/dev/null holds 0 bytes"),
        (["--config", "/nowhere/config.json"], 1, "/nowhere/config.json"),
    ],
)
def test_what_serve_cannot_do_is_said_without_a_traceback(
    tmp_path: Path, options: list[str], code: int, said: str
) -> None:
    tmp_path.chmod(0o700)
    command = [sys.executable, "-m", "omni_flow.data.cli", "serve", "--path", str(tmp_path / "m.sock"), "--temp", "0"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_socket_is_left_where_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    mine = tmp_path / "mine"
    mine.write_text("precious")
    result = subprocess.run(
        [sys.executable, "-m", "omni_flow.data.cli", "serve", "--path", str(mine), "--temp", "0"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "no socket, it is left as it is" in result.stderr
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(mine, "precious")]


def test_a_second_manager_at_a_path_makes_no_memory_before_it_is_refused(manager: Make) -> None:
    server = manager()
    beyond = PoolSpec(name="kv", page_bytes=1 << 40, l1_pages=1 << 10)
    with pytest.raises(Disconnected, match="already serves"):
        start(msgspec.structs.replace(server.config, pools=(beyond,)))


@pytest.mark.parametrize("module", ["mover", "cuda_mover", "ssd.mover", "metrics"])
def test_processes_beside_a_manager_that_is_not_there_say_so(module: str) -> None:
    more = {"ssd.mover": ["/nowhere/ssd", "16000000"], "metrics": ["9400"]}.get(module, [])
    command = [sys.executable, "-m", f"omni_flow.data.{module}", "/nowhere/m.sock", *more]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("no memory manager at /nowhere/m.sock")
    assert result.stderr.count("\n") == 1


def test_metrics_whose_port_is_taken_say_so(manager: Make) -> None:
    server = manager()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "omni_flow.data.metrics", server.path, str(port)]
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == f"no metrics at port {port}: Address already in use; choose another --metrics-port\n"


def test_sizes_and_pools_are_read_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("64K", "1.5M", "2G", "77")] == [65536, 3 << 19, 2 << 30, 77]
    spec = parse_pool("name=kv,page=2M,l1=16,l3=9")
    assert (spec.page_bytes, spec.l1_pages, spec.l2_pages, spec.l3_pages) == (2 << 20, 16, 0, 9)
    for text in ("kv", "name=kv", "name=kv,page=x,l1=1"):
        with pytest.raises(Exception, match="write"):
            parse_pool(text)


def test_an_l1_on_a_device_takes_no_part_in_transfers_itself() -> None:
    assert host_tiers(PoolInfo("kv", 64, 8, 16, False)) == ((1, 8), (2, 16))
    assert host_tiers(PoolInfo("kv", 64, 8, 16, False, l1_device=0)) == ((2, 16),)
    assert host_tiers(PoolInfo("kv", 64, 8, 0, False, l1_device=0)) == ()
    spec = parse_pool("name=kv,page=54K,l1=8,l2=8,device=0,planes=27,padding=1")
    assert (spec.l1_device, spec.planes, spec.padding) == (0, 27, 1)
