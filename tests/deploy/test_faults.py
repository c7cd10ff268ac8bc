"""Deaths of real processes: what touched them ends, all else goes on, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from omni_flow import Batch, Graph, NoReplica, Outcome, RequestFailed, Text, launch
from omni_flow.control.runtime.gateway import Gateway
from omni_flow.control.runtime.node import Node
from omni_flow.control.runtime.values import Values
from omni_flow.control.runtime.wire import BatchCodec, Subscribe
from omni_flow.control.transport import make_transport
from omni_flow.control.transport.packets import hello
from omni_flow.deploy.local import AsyncDeployment

from .conftest import BARE, Events, alive, bare, emptied, ended, outcome_of, parent_of, pid_of
from .roles import Ails, ClosesSlowly, Echo, Exits, Hangs, Pid, Spawns, diamond, held, one

SHORT, LONG = "abcdefghijklmnop", "abcdefghij" * 12


def whole(text: str) -> dict[str, Any]:
    """What a diamond answers."""
    return {"both": text.upper() + text, "each": list(text.upper()), "same": "o"}


async def under_load(app: AsyncDeployment, kill: str) -> list[Any]:
    """Outcomes of 30 requests under way when a replica is killed: True for the right answer, else the failure.

    The long ones are under way for certain: nobody takes their outputs, and they have more than the credit allows.
    """
    texts = [LONG] * 5 + [SHORT] * 25
    requests = [await app.submit(text=text, other="o") for text in texts]
    for request in requests[:5]:
        first = aiter(request)
        await anext(first)
        await first.aclose()
    os.kill(pid_of(app, kill), signal.SIGKILL)
    outcomes = [await outcome_of(request) for request in requests]
    return [
        outcome if isinstance(outcome, RequestFailed) else outcome == whole(text)
        for text, outcome in zip(texts, outcomes, strict=True)
    ]


@pytest.mark.parametrize("transport", ["unix", "ipc"])
@pytest.mark.parametrize("kill", ["letters/0", "upper/0", "upper/1", "lower/1", "join/0"])
def test_requests_that_touched_a_killed_replica_fail_with_the_cause_and_it_comes_again(
    kill: str, transport: str
) -> None:
    async def body() -> None:
        events = Events()
        async with bare(diamond(), events, transport=transport) as app:
            outcomes = await under_load(app, kill)
            failed = [o for o in outcomes if isinstance(o, RequestFailed)]
            assert len(failed) >= 5
            for failure in failed:
                assert failure.outcome is Outcome.FAILED
                assert f"replica {kill}@0 died: its process was ended by SIGKILL" in str(failure)
            assert all(o for o in outcomes if not isinstance(o, RequestFailed))
            await events.until(f"{kill}@1 is up")
            status = app.status()[kill.partition("/")[0]]
            assert (status.state, sum(r.restarts for r in status.replicas)) == ("up", 1)
            requests = [await app.submit(text=SHORT, other="o") for _ in range(10)]
            assert [await outcome_of(r) for r in requests] == [whole(SHORT)] * 10

    asyncio.run(body())


def test_requests_that_never_touched_a_killed_replica_are_unharmed() -> None:
    async def body() -> None:
        events = Events()
        async with bare(held(replicas=2), events) as app:
            requests = [await app.submit() for _ in range(20)]
            for request in requests:
                await request.send("x", "a")
            os.kill(pid_of(app, "r/0"), signal.SIGKILL)
            await events.until("r/0@0 died")
            for request in requests:
                await request.end("x")
            outcomes = [await outcome_of(request) for request in requests]
            assert len([o for o in outcomes if isinstance(o, RequestFailed)]) == 10
            assert [o for o in outcomes if isinstance(o, dict)] == [{"y": "a"}] * 10

    asyncio.run(body())


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_requests_survive_a_killed_replica_whose_interfaces_declare_retries(replicas: int) -> None:
    async def body() -> None:
        events = Events()
        async with bare(diamond(upper=replicas, retries=1), events) as app:
            outcomes = await under_load(app, "upper/0")
            assert outcomes == [True] * 30
            await events.until("upper/0@1 is up")

    asyncio.run(body())


def test_a_gateway_goes_on_while_replicas_are_killed_one_after_another() -> None:
    async def body() -> None:
        events = Events()
        async with bare(diamond(retries=3), events) as app:
            for epoch in range(3):
                for place in ("upper/0", "upper/1"):
                    outcomes = await under_load(app, place)
                    assert outcomes == [True] * 30
                    await events.until(f"{place}@{epoch + 1} is up")

    asyncio.run(body())


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        ("hard", "its process ended with status 9"),
        ("softly", "role code ended its process: SystemExit('enough')"),
        ("softly_in_thread", "role code ended its process: SystemExit('enough')"),
    ],
)
def test_a_role_that_ends_its_process_fails_the_request_with_that_cause(method: str, cause: str) -> None:
    async def body() -> None:
        async with bare(one(Exits, method)) as app:
            failed = await outcome_of(await app.submit(x=""))
            assert isinstance(failed, RequestFailed)
            assert cause in str(failed)

    asyncio.run(body())


@pytest.mark.parametrize("batch", [None, Batch(max=1)])
def test_a_thread_that_outlives_its_request_costs_its_replica_a_restart(batch: Batch | None) -> None:
    graph = Graph("one")
    x = graph.placeholder("x", Text)
    method = "in_thread" if batch is None else "batch_in_thread"
    graph.output(y=graph.role("r", Hangs).interface(method, inputs=[[x]], outputs=["y"], batch=batch).y)

    async def body() -> None:
        events = Events()
        async with bare(graph, events, grace_s=0.2) as app:
            failed = await outcome_of(await app.submit(x="hang", deadline=0.1))
            assert isinstance(failed, RequestFailed)
            assert failed.outcome is Outcome.DEADLINE
            assert "runs on in its thread 0.2 s after its request was closed" in await events.until("r/0@0 died")
            await events.until("r/0@1 is up")
            assert await outcome_of(await app.submit(x="a")) == {"y": "a"}

    asyncio.run(body())


def test_a_batch_that_somebody_still_waits_for_may_take_its_time() -> None:
    graph = Graph("one")
    x = graph.placeholder("x", Text)
    batch = Batch(max=2, wait_ms=60_000)
    role = graph.role("r", Hangs)
    graph.output(y=role.interface("batch_takes_its_time", inputs=[[x]], outputs=["y"], batch=batch).y)

    async def body() -> None:
        async with bare(graph, grace_s=0.1) as app:
            late, other = await app.submit(x="late", deadline=0.2), await app.submit(x="other")
            assert isinstance(await outcome_of(late), RequestFailed)
            assert await outcome_of(other) == {"y": "other"}

    asyncio.run(body())


def test_async_role_code_that_blocks_its_loop_is_found_and_named() -> None:
    async def body() -> None:
        events = Events()
        async with bare(one(Hangs, "on_loop"), events, stall_s=2.0) as app:
            failed = await outcome_of(await app.submit(x="hang"))
            assert isinstance(failed, RequestFailed)
            assert "its event loop did not turn for 2 s: `async` role code blocks at" in str(failed)
            assert "roles.py:" in str(failed)
            await events.until("r/0@1 is up")
            assert await outcome_of(await app.submit(x="a")) == {"y": "a"}

    asyncio.run(body())


def test_role_code_that_keeps_the_interpreters_lock_is_ended_too(capfd: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        events = Events()
        async with bare(one(Hangs, "with_the_lock"), events, stall_s=2.0) as app:
            failed = await outcome_of(await app.submit(x="hang"))
            assert isinstance(failed, RequestFailed)
            assert "its process ended with status 1" in str(failed)
            await events.until("r/0@1 is up")
            assert await outcome_of(await app.submit(x="a")) == {"y": "a"}

    asyncio.run(body())
    assert "in with_the_lock" in capfd.readouterr().err


def test_a_replica_that_lives_but_cannot_be_reached_is_ended_and_started_again() -> None:
    async def body() -> None:
        events = Events()
        async with bare(one(Echo), events) as app:
            here = app.gateway.node
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
                impostor.connect(here.address.removeprefix("unix://"))
                impostor.send(hello(here.roster.live["r/0@0"].address))
                line = await events.until("r/0@0 died")
            assert "it was ended, for it could not be reached: the peer opened a new connection" in line
            await events.until("r/0@1 is up")
            assert await outcome_of(await app.submit(x="a")) == {"y": "a"}

    asyncio.run(body())


def test_a_place_whose_replica_cannot_be_loaded_any_more_goes_down_and_others_serve_on(tmp_path: Path) -> None:
    class Once:
        def setup(self) -> None:
            mine = tmp_path / str(len(os.listdir(tmp_path)))
            if len(os.listdir(tmp_path)) > 2:
                raise RuntimeError("no more")
            mine.touch()

        async def run(self, x: str) -> str:
            return x

    async def body() -> None:
        events = Events()
        async with bare(one(Once, replicas=2), events, backoff_s=(0.0, 0.01), log_level="CRITICAL") as app:
            os.kill(pid_of(app, "r/0"), signal.SIGKILL)
            await events.until("r/0 is down")
            status = app.status()["r"]
            assert (status.state, [r.state for r in status.replicas]) == ("degraded", ["down", "up"])
            assert "RuntimeError: no more" in status.replicas[0].cause
            assert await outcome_of(await app.submit(x="a")) == {"y": "a"}

    asyncio.run(body())


@pytest.mark.parametrize("processes", [True, False])
def test_a_replica_that_says_that_it_cannot_serve_is_not_up(tmp_path: Path, processes: bool) -> None:
    file = tmp_path / "ails"

    def until(state: str, cause: str) -> None:
        late = time.monotonic() + 20
        while [(r.state, r.cause) for r in app.status()["r"].replicas] != [(state, cause)]:
            assert time.monotonic() < late
            time.sleep(0.01)
        assert app.status()["r"].state == state

    with launch(one(Ails, init={"file": str(file)}), **BARE, processes=processes) as app:
        for _ in range(2):
            until("up", "")
            file.write_text("its engine died")
            until("starting", "its engine died")
            assert app.submit(x="a").result(timeout=20) == {"y": "a"}
            file.unlink()
        until("up", "")


def test_a_role_that_closes_is_not_said_to_be_unable_to_serve(tmp_path: Path) -> None:
    events = Events()
    with launch(one(ClosesSlowly, init={"file": str(tmp_path / "closed")}), **BARE, on_event=events) as app:
        assert app.submit(x="a").result(timeout=20) == {"y": "a"}
    assert (tmp_path / "closed").exists()
    assert [line for line in events.lines if "can't serve" in line] == []


def test_a_request_that_waits_for_a_replica_that_never_comes_fails_with_the_cause(tmp_path: Path) -> None:
    class Once:
        def setup(self) -> None:
            (tmp_path / "once").touch(exist_ok=False)

        async def run(self, x: str) -> str:
            os._exit(1)

    async def body() -> None:
        graph = Graph("one")
        x = graph.placeholder("x", Text)
        graph.output(y=graph.role("r", Once).interface("run", inputs=[[x]], outputs=["y"], retries=5).y)
        async with bare(graph, backoff_s=(0.0,), log_level="CRITICAL") as app:
            failed = await outcome_of(await app.submit(x="a"))
            assert isinstance(failed, RequestFailed)
            assert "replica r/0@0 died: its process ended with status 1; none comes after it" in str(failed)
            with pytest.raises(NoReplica, match="role 'r' has no live replica"):
                await app.submit(x="a")
            assert app.status()["r"].state == "down"

    asyncio.run(body())


def test_the_requests_of_a_gateway_that_is_gone_are_forgotten() -> None:
    async def body() -> None:
        graph = held(replicas=2)
        async with bare(graph) as app:
            here = app.gateway.node
            transport = make_transport(here.address.replace(".sock", ".other.sock"), BatchCodec())
            other = Node(graph.compile().plan, transport, Values(), registry=here.address)
            gateway = Gateway(other)
            known = asyncio.Event()
            take = gateway.roster_changed
            gateway.roster_changed = lambda: (take(), known.set())  # type: ignore[assignment,func-returns-value]
            await other.start()
            other.post(here.address, Subscribe(gateway.id, other.address))
            async with asyncio.timeout(10):
                await known.wait()
            requests = [gateway.submit({}) for _ in range(4)]
            for request in requests:
                await request.push("x", "a")
            other.flush()
            held_there = {}
            while sum(held["requests"] for held in held_there.values()) < 4:
                held_there = await app.census()
            await transport.close()
            assert await emptied(app) == {}

    asyncio.run(body())


def test_processes_that_a_role_started_end_with_it() -> None:
    async def body() -> None:
        async with bare(one(Spawns)) as app:
            result = await outcome_of(await app.submit(x=""))
            assert isinstance(result, dict)
            child = result["y"]
            assert alive(child)
            os.kill(pid_of(app, "r/0"), signal.SIGKILL)
            await ended(child)

    asyncio.run(body())


def test_a_nursery_that_is_killed_is_replaced_with_all_replicas() -> None:
    async def body() -> None:
        events = Events()
        async with bare(one(Pid, replicas=2), events) as app:
            before = [pid_of(app, "r/0"), pid_of(app, "r/1")]
            os.kill(parent_of(before[0]), signal.SIGKILL)
            for pid in before:
                await ended(pid)
            await events.until("r/0@1 is up")
            await events.until("r/1@1 is up")
            result = await outcome_of(await app.submit(x=""))
            assert isinstance(result, dict)
            assert result["y"] not in before

    asyncio.run(body())


def test_a_replica_that_somebody_else_ends_is_started_again() -> None:
    async def body() -> None:
        events = Events()
        async with bare(one(Echo), events) as app:
            os.kill(pid_of(app, "r/0"), signal.SIGTERM)
            assert "its process ended with status 0" in await events.until("r/0@0 died")
            await events.until("r/0@1 is up")

    asyncio.run(body())
