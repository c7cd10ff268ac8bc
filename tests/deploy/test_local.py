"""Real processes: launch, serve, scale, close."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from omni_flow import ABSENT, RequestFailed, launch
from omni_flow.deploy.errors import LaunchError, RunDirInUse, UnknownRole
from omni_flow.deploy.local import alaunch

from .conftest import BARE, Events, bare, emptied, pid_of, pids
from .roles import BadSetup, DiesWhileLoading, Echo, Hangs, Pid, Tidy, Unloadable, diamond, held, one

HERE = Path(__file__).parent


@pytest.mark.parametrize("transport", ["unix", "ipc", "tcp", "inproc"])
def test_a_diamond_with_a_stream_over_two_replicas_answers(transport: str) -> None:
    async def body() -> None:
        async with bare(diamond(), transport=transport) as app:
            requests = [await app.submit(text="aBc", other="o") for _ in range(20)]
            for request in requests:
                assert await request.result() == {"both": "ABCabc", "each": ["A", "B", "C"], "same": "o"}

    asyncio.run(body())


def test_the_plain_client_sees_outputs_as_they_come_from_any_thread() -> None:
    with launch(diamond(), **BARE, replicas={"upper": 1}) as app:
        seen: list[list[tuple[str, object]]] = []
        threads = [
            threading.Thread(target=lambda: seen.append(list(app.submit(text="ab", other="o")))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 4
        for values in seen:
            assert sorted(values) == [("both", "ABab"), ("each", "A"), ("each", "B"), ("same", "o")]
        assert app.session(id="s").submit(text="a").result(timeout=10) == {"both": "Aa", "each": ["A"], "same": ABSENT}
        assert {name: role.state for name, role in app.status().items()} == dict.fromkeys(
            ["letters", "upper", "lower", "join", "bystander"], "up"
        )


def test_a_client_may_take_the_first_value_and_then_await_the_rest_whatever_the_credit() -> None:
    async def body() -> None:
        async with bare(diamond(), credit=4) as app:
            request = await app.submit(text="abcdefghij" * 3, other="o")
            first = aiter(request)
            await anext(first)
            await emptied(app, rounds=20)
            result = await request.result()
            assert result["each"] == list("ABCDEFGHIJ" * 3)

    asyncio.run(body())


def test_every_replica_is_a_process_and_requests_are_spread() -> None:
    async def body() -> None:
        async with bare(one(Pid, replicas=3)) as app:
            found = set()
            for _ in range(12):
                live = [await app.submit(x="") for _ in range(3)]
                found |= {(await request.result())["y"] for request in live}
            assert found == set(pids(app))
            assert os.getpid() not in found

    asyncio.run(body())


def test_closures_and_local_classes_can_be_launched() -> None:
    word = "closed over"

    class Local:
        async def run(self, x: str) -> str:
            return f"{x} {word}"

    with launch(one(Local), **BARE) as app:
        assert app.submit(x="is").result(timeout=10) == {"y": "is closed over"}


def test_a_fresh_interpreter_imports_the_target() -> None:
    with launch(diamond(), **BARE, target=f"{HERE / 'target.py'}:graph") as app:
        assert app.submit(text="a").result(timeout=10)["both"] == "Aa"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "start='spawn' needs a target"),
        ("nowhere.py:graph", "nowhere.py: no such file or folder"),
        (f"{HERE / 'target.py'}:another", "the target holds another graph than the one launched"),
    ],
)
def test_a_wrong_target_is_said(target: str | None, message: str, run_directories: Path) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(diamond(), **BARE, start="spawn", target=target)
    assert not run_directories.exists() or list(run_directories.iterdir()) == []


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (
            Unloadable,
            r"role 'r': ModuleNotFoundError: No module named 'a_module_that_nobody_has' \(.*roles.py:\d+\); "
            "install what provides 'a_module_that_nobody_has'",
        ),
        (DiesWhileLoading, r"role 'r': its process ended with status 9"),
        (BadSetup, r"role 'r': ValueError: the weights are of another model \(.*roles.py:\d+\)"),
    ],
)
def test_a_role_that_cannot_be_loaded_is_named_with_cause_place_and_mend(
    role: type, message: str, run_directories: Path
) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        launch(one(role), **BARE)
    assert "Traceback" not in str(caught.value)
    assert not run_directories.exists() or list(run_directories.iterdir()) == []


def test_a_role_that_cannot_be_loaded_is_named_in_one_process_too() -> None:
    with pytest.raises(LaunchError, match=r"role 'r': ValueError: the weights are of another model \(.*roles.py:\d+\)"):
        launch(one(BadSetup), **BARE, processes=False)


def test_a_deployment_launched_by_a_thread_closes_its_roles_in_order_and_logs_with_their_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        with launch(one(Tidy, init={"file": str(tmp_path / "closed")}), **BARE) as app:
            assert app.submit(x="a").result(timeout=10) == {"y": "a"}

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert (tmp_path / "closed").exists()
    assert "r/0@0 INFO omni_flow.role.r: got a" in capfd.readouterr().err


def test_a_deployment_can_live_on_uvloop() -> None:
    async def body() -> None:
        async with bare(diamond()) as app:
            assert (await (await app.submit(text="a")).result())["both"] == "Aa"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica": {"r": 2}}, "launch takes no option 'replica'; it takes replicas, credit"),
        ({"transport": "udp"}, "transport='udp' is not one of unix, ipc, tcp, inproc"),
        ({"start": "thread"}, "start='thread' is not one of auto, fork, spawn"),
    ],
)
@pytest.mark.parametrize("processes", [True, False])
def test_unknown_options_are_refused(options: dict[str, Any], message: str, processes: bool) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        launch(one(Echo), **BARE, processes=processes, **options)


def test_debug_shows_the_traceback_of_a_role_that_cannot_be_loaded() -> None:
    with pytest.raises(LaunchError, match="Traceback"):
        launch(one(BadSetup), **BARE, debug=True)


def test_unknown_roles_and_counts_are_refused() -> None:
    with pytest.raises(UnknownRole, match="no role 'nope'; it has r"):
        launch(one(Echo), **BARE, replicas={"nope": 1})
    with pytest.raises(ValueError, match="role 'r' needs at least one replica, not 0"):
        launch(one(Echo), **BARE, replicas={"r": 0})


def test_two_deployments_at_once_do_not_meet() -> None:
    async def body() -> None:
        async with bare(one(Pid)) as first, bare(one(Pid)) as second:
            a, b = await first.submit(x=""), await second.submit(x="")
            assert (await a.result())["y"] in pids(first)
            assert (await b.result())["y"] in pids(second)

    asyncio.run(body())


def test_a_run_directory_belongs_to_one_deployment(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    with launch(one(Echo), **BARE, run_dir=place) as app:
        with pytest.raises(RunDirInUse, match="belongs to a deployment that lives"):
            launch(one(Echo), **BARE, run_dir=place)
        assert app.submit(x="a").result(timeout=10) == {"y": "a"}
    assert not os.path.exists(place)


def test_scaling_up_and_down_under_load_harms_no_request() -> None:
    async def body() -> None:
        events = Events()
        async with bare(diamond(upper=1), events) as app:
            stop = asyncio.Event()
            done = 0

            async def load() -> None:
                nonlocal done
                while not stop.is_set():
                    request = await app.submit(text="abcdef", other="o")
                    assert (await request.result())["both"] == "ABCDEFabcdef"
                    done += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(load())
                await app.scale("upper", 3)
                assert [r.place for r in app.status()["upper"].replicas] == ["upper/0", "upper/1", "upper/2"]
                await app.scale("upper", 1)
                await app.scale("upper", 2)
                stop.set()
            assert done > 0
            assert [(r.place, r.state) for r in app.status()["upper"].replicas] == [
                ("upper/0", "up"),
                ("upper/1", "up"),
            ]
            assert app.status()["letters"].replicas[0].restarts == 0

    asyncio.run(body())


def test_a_replica_leaves_only_when_its_requests_have_ended() -> None:
    async def body() -> None:
        events = Events()
        async with bare(held(replicas=2), events) as app:
            requests = [await app.submit() for _ in range(4)]
            leaving = asyncio.create_task(app.scale("r", 1))
            await events.until("r/1@0 is leaving")
            requests.append(await app.submit())
            assert [r.state for r in app.status()["r"].replicas] == ["up", "leaving"]
            for request in requests:
                await request.send("x", "a")
                assert not leaving.done()
                await request.end("x")
                assert await request.result() == {"y": "a"}
            await leaving
            assert [r.place for r in app.status()["r"].replicas] == ["r/0"]

    asyncio.run(body())


def test_a_place_that_comes_again_goes_on_counting_its_incarnations() -> None:
    async def body() -> None:
        events = Events()
        async with bare(one(Echo, replicas=2), events) as app:
            os.kill(pid_of(app, "r/1"), signal.SIGKILL)
            await events.until("r/1@1 is up")
            await app.scale("r", 1)
            await app.scale("r", 2)
            again = app.status()["r"].replicas[1]
            assert (again.place, again.epoch, again.restarts, again.state) == ("r/1", 2, 0, "up")

    asyncio.run(body())


def test_a_drain_that_takes_too_long_ends_the_requests_with_the_cause() -> None:
    async def body() -> None:
        async with bare(one(Hangs, "politely", replicas=2)) as app:
            requests = [await app.submit(x="a") for _ in range(2)]
            await app.scale("r", 1, drain_s=0.1)
            failed = [request for request in requests if request.outcome is not None]
            assert len(failed) == 1
            with pytest.raises(RequestFailed, match="it left before its requests had ended"):
                await failed[0].result()
            for request in requests:
                await request.cancel()

    asyncio.run(body())


def test_scaling_up_with_a_role_that_no_longer_loads_is_said_and_others_serve_on(tmp_path: Path) -> None:
    class Once:
        def setup(self) -> None:
            with open(tmp_path / "once", "x"):
                pass

        async def run(self, x: str) -> str:
            return x

    async def body() -> None:
        async with bare(one(Once)) as app:
            with pytest.raises(LaunchError, match="role 'r': FileExistsError"):
                await app.scale("r", 2)
            assert [r.place for r in app.status()["r"].replicas] == ["r/0"]
            assert await (await app.submit(x="a")).result() == {"y": "a"}

    asyncio.run(body())


def test_closing_cancels_live_requests_and_ends_every_process() -> None:
    async def body() -> None:
        app = await alaunch(one(Hangs, "politely"), **BARE)
        request = await app.submit(x="a")
        seen = pids(app)
        await app.close(drain_s=0)
        assert str(request.outcome) == "cancelled"
        for pid in seen:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(body())


def test_closing_waits_for_live_requests() -> None:
    async def body() -> None:
        app = await alaunch(held(), **BARE)
        request = await app.submit()
        closing = asyncio.create_task(app.close(drain_s=20))
        await request.send("x", "a")
        await request.end("x")
        await closing
        assert await request.result() == {"y": "a"}

    asyncio.run(body())


def test_a_gateway_that_closes_leaves_nothing_in_the_replicas() -> None:
    async def body() -> None:
        async with bare(held(replicas=2)) as app:
            requests = [await app.submit() for _ in range(6)]
            for request in requests:
                await request.send("x", "a")
            await app.gateway.close()
            assert await emptied(app) == {}
            assert {str(request.outcome) for request in requests} == {"cancelled"}

    asyncio.run(body())


@pytest.mark.parametrize(("launches", "options"), [(10, BARE), (2, {})])
def test_launches_in_a_row_leak_nothing(launches: int, options: dict[str, Any], run_directories: Path) -> None:
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def children() -> str:
        return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()

    with launch(one(Echo), **options):
        pass
    before, threads = open_files(), threading.active_count()
    for _ in range(launches):
        with launch(one(Echo), **options) as app:
            assert app.submit(x="a").result(timeout=10) == {"y": "a"}
    assert open_files() <= before
    assert threading.active_count() <= threads
    assert children() == ""
    assert list(run_directories.iterdir()) == []
