"""How methods are called and what becomes of what they say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omni_flow import ABSENT, Batch, Graph, RequestFailed, Tensor, Text, collect, last, optional, stream
from omni_flow.control.runtime.client import AsyncSession

from .conftest import deployed, settled
from .roles import (
    Batched,
    Busy,
    Counter,
    Double,
    Echo,
    Keeper,
    Odd,
    Pair,
    PlainKeeper,
    Slow,
    Total,
    Upper,
    Where,
    Wrong,
)

Run = Callable[..., dict[str, Any]]


def one(cls: type, method: str, outputs: list[Any], **options: Any) -> tuple[Graph, Any]:
    """A graph of one interface that reads the placeholder x."""
    graph = Graph("one")
    x = graph.placeholder("x", int)
    return graph, graph.role("r", cls).interface(method, inputs=[[x]], outputs=outputs, **options)


def failure_of(graph: Graph, **inputs: Any) -> RequestFailed:
    async def body() -> RequestFailed:
        async with deployed(graph) as app:
            request = await AsyncSession(app.gateway).submit(**inputs)
            with pytest.raises(RequestFailed) as caught:
                await request.result()
            return caught.value

    return asyncio.run(body())


def test_a_failing_method_without_outputs_is_named_by_its_interface() -> None:
    graph, _ = one(Wrong, "raises", [])
    assert set(failure_of(graph, x=1).failures) == {"r.raises"}


def test_a_plain_method_runs_in_a_worker_thread(run: Run) -> None:
    graph, where = one(Where, "thread", ["y"])
    graph.output(y=where.y)
    assert run(graph, x=1) == {"y": False}


def test_plain_and_async_methods_and_generators_chain(run: Run) -> None:
    graph = Graph("chain")
    n = graph.placeholder("n", int)
    counter = graph.role("counter", Counter)
    numbers = counter.interface("count", inputs=[[n]], outputs=[stream("frame")])
    doubled = graph.role("double", Double).interface("run", inputs=[[{"x": numbers.frame}]], outputs=["y"])
    total = graph.role("total", Total).interface("run", inputs=[[{"xs": collect(doubled.y)}]], outputs=["sum"])
    again = counter.interface("count_in_thread", inputs=[[{"n": last(doubled.y)}]], outputs=[stream("frame")])
    graph.output(sum=total.sum, each=doubled.y, again=again.frame)
    assert run(graph, n=4) == {"sum": 12, "each": [0, 2, 4, 6], "again": [0, 1, 2, 3, 4, 5]}


def test_a_generator_with_several_outputs_says_which(run: Run) -> None:
    graph = Graph("both")
    n = graph.placeholder("n", int)
    both = graph.role("counter", Counter).interface("both", inputs=[[n]], outputs=[stream("frame"), "total"])
    graph.output(frames=collect(both.frame), total=both.total)
    assert run(graph, n=3) == {"frames": [0, 1, 2], "total": 3}


def test_an_absent_optional_input_leaves_the_default(run: Run) -> None:
    graph = Graph("optional")
    a, b = graph.placeholder("a", Text), graph.placeholder("b", Text)
    pair = graph.role("pair", Pair).interface("run", inputs=[[a, optional(b)]], outputs=["y"])
    graph.output(y=pair.y)
    assert run(graph, a="x") == {"y": ["x", "none"]}


def test_what_a_role_says_last_of_its_progress_stands_in_the_timeline() -> None:
    graph = Graph("busy")
    x = graph.placeholder("x", int)
    busy = graph.role("busy", Busy)
    first = busy.interface("run", inputs=[[x]], outputs=["y"])
    second = busy.interface("in_thread", inputs=[[{"x": first.y}]], outputs=[stream("z")])
    graph.output(z=second.z)

    async def body() -> list[tuple[str, str]]:
        async with deployed(graph) as app:
            request = await AsyncSession(app.gateway).submit(x=3, timeline=True)
            await request.result()
            return [(span.interface, span.note) for span in request.timeline()]

    assert asyncio.run(body()) == [("busy.run", "all of 3"), ("busy.in_thread", "3 in a thread")]


@pytest.mark.parametrize("cls", [Keeper, PlainKeeper])
def test_a_role_lets_go_of_a_session_that_is_closed_and_of_no_other(
    cls: type, caplog: pytest.LogCaptureFixture
) -> None:
    graph, keep = one(cls, "keep", ["y"])
    graph.output(y=keep.y)

    async def body() -> list[int]:
        said = []
        async with deployed(graph) as app:
            async with AsyncSession(app.gateway, "a") as session, AsyncSession(app.gateway, "b") as other:
                for turn in (session, session, other, session):
                    said.append((await (await turn.submit(x=0)).result())["y"])
                await session.close()
                for turn in (session, other):
                    said.append((await (await turn.submit(x=0)).result())["y"])
            app.gateway.end_session("never seen")
            await (await AsyncSession(app.gateway).submit(x=0)).result()
        return said

    assert asyncio.run(body()) == [1, 2, 1, 3, 1, 2]
    assert caplog.text.count("end_session raised") == 1


class TakesNothing(Echo):
    async def end_session(self) -> None:
        pass


class Leaves(Upper):
    def end_session(self, session: str, tenant: str) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("cls", [TakesNothing, Leaves])
def test_an_end_session_that_goes_wrong_harms_nobody(cls: type, caplog: pytest.LogCaptureFixture) -> None:
    graph = Graph("one")
    x = graph.placeholder("x", Text)
    graph.output(y=graph.role("r", cls).interface("run", inputs=[[x]], outputs=["y"]).y)

    async def body() -> None:
        async with deployed(graph) as app:
            async with AsyncSession(app.gateway):
                pass
            assert (await (await AsyncSession(app.gateway).submit(x="A")).result()) == {"y": "A"}

    asyncio.run(body())
    assert caplog.text.count("end_session raised") == 1


@pytest.mark.parametrize("cls", [Keeper, PlainKeeper])
def test_nothing_is_kept_of_a_session_that_was_closed_before_its_last_request_got_to_the_role(cls: type) -> None:
    graph = Graph("late")
    sent = graph.placeholder("sent", int, stream=True)
    graph.output(y=graph.role("keep", cls).interface("keep", inputs=[[{"x": last(sent)}]], outputs=["y"]).y)

    async def body() -> None:
        async with deployed(graph) as app:
            async with AsyncSession(app.gateway, "a") as session:
                request = await session.submit()
            await request.send("sent", 5)
            await request.end("sent")
            assert await request.result() == {"y": 1}
            [role] = [replica.instance for replica in app.replicas]
            async with asyncio.timeout(60):
                while role.kept:  # noqa: ASYNC110 - its thread empties it
                    await asyncio.sleep(0.001)

    asyncio.run(body())


def test_absent_travels_to_the_client(run: Run) -> None:
    graph, wrong = one(Wrong, "absent", ["y"])
    upper = graph.role("upper", Upper).interface("run", inputs=[[{"x": wrong.y}]], outputs=["z"])
    graph.output(y=wrong.y, z=upper.z)
    assert run(graph, x=1) == {"y": ABSENT, "z": ABSENT}


@pytest.mark.parametrize(
    ("method", "outputs", "out", "cause"),
    [
        ("raises", ["y"], "y", "ValueError: no 1"),
        ("unknown", ["a", "b"], "b", "gave 'nope'; its outputs are ['a', 'b']"),
        ("no_dict", ["a", "b"], "a", "must return a dict of them, not int"),
        ("wrong_type", [{"y": Text}], "y", "'r.wrong_type.y' of 'r.wrong_type': expected Text, got int"),
        ("wrong_shape", [{"y": Tensor("float32", (2, 4))}], "y", "expected Tensor(float32, (2, 4)), got"),
    ],
)
def test_a_role_that_breaks_a_rule_fails_its_request_with_the_cause(
    method: str, outputs: list[Any], out: str, cause: str
) -> None:
    graph, wrong = one(Wrong, method, outputs)
    graph.output(out=wrong[out])
    failed = failure_of(graph, x=1)
    assert failed.outcome == "failed"
    assert cause in failed.failures["out"].cause
    assert failed.failures["out"].interface == f"r.{method}"


def test_a_second_value_of_a_single_output_fails_what_is_still_open() -> None:
    graph, wrong = one(Wrong, "twice", [stream("y"), "total"])
    graph.output(y=wrong.y, total=wrong.total)
    failed = failure_of(graph, x=1)
    assert failed.partial == {"y": [1], "total": 1}
    assert set(failed.failures) == {"y"}


def test_a_stream_that_raises_is_torn_after_what_it_gave() -> None:
    graph, wrong = one(Wrong, "torn", [stream("y")])
    graph.output(y=wrong.y)
    assert failure_of(graph, x=1).partial == {"y": [1, 2]}


def test_on_error_absent_degrades(run: Run) -> None:
    graph, wrong = one(Wrong, "raises", ["y"], on_error="absent")
    graph.output(y=wrong.y)
    assert run(graph, x=1) == {"y": ABSENT}


def test_the_context_tells_session_params_seed_path_retries_and_deadline() -> None:
    graph = Graph("context")
    x = graph.placeholder("x", int)
    graph.param("n", int, 3)
    where = graph.role("r", Where).interface("context", inputs=[[x]], outputs=["y"], retries=2)
    graph.output(y=where.y)

    async def body() -> None:
        async with deployed(graph) as app:
            session = AsyncSession(app.gateway, id="s1", params={"n": 5})
            first = (await (await session.submit(x=1, deadline=60, seed=7)).result())["y"]
            again = (await (await session.submit(x=1, deadline=60, seed=7, params={"n": 9})).result())["y"]
            other = (await (await session.submit(x=1, seed=8)).result())["y"]
        assert (first["session"], first["n"], first["deadline"], first["path"]) == ("s1", 5, True, "")
        assert again["n"] == 9
        assert first["retries"] == 2
        assert again["seed"] == first["seed"] != other["seed"]

    asyncio.run(body())


def test_the_body_of_a_loop_sees_its_iteration(run: Run) -> None:
    graph = Graph("loop")
    entry = graph.placeholder("entry", int)
    back = graph.feedback("back")
    step = graph.role("r", Where).interface("step", inputs=[[entry], [back]], outputs=["value", "seen"], max_iters=3)
    back.bind(step.value)
    graph.output(value=last(step.value), seen=collect(step.seen))
    assert run(graph, entry=10) == {"value": 13, "seen": [[0, False], [1, False], [2, True]]}


def test_loops_that_max_iters_ends_are_counted() -> None:
    graph = Graph("loop")
    entry = graph.placeholder("entry", int)
    back = graph.feedback("back")
    step = graph.role("r", Where).interface("step", inputs=[[entry], [back]], outputs=["value", "seen"], max_iters=3)
    back.bind(step.value)
    graph.output(value=last(step.value))

    async def body() -> None:
        async with deployed(graph) as app:
            for _ in range(2):
                await (await AsyncSession(app.gateway).submit(entry=10)).result()
            await settled(app)
            assert app.replicas[0].counters() == {"facts_dropped": 0, "loops_stopped": 2}

    asyncio.run(body())


def test_a_batch_takes_many_requests_and_one_bad_item_fails_alone() -> None:
    graph, square = one(Batched, "square", ["y"], batch=Batch(max=8, wait_ms=20))
    graph.output(y=square.y)

    async def body() -> None:
        async with deployed(graph) as app:
            session = AsyncSession(app.gateway)
            requests = [await session.submit(x=k) for k in (1, 2, 13, 4)]
            results = await asyncio.gather(*(r.result() for r in requests), return_exceptions=True)
            assert [r["y"] for r in results if isinstance(r, dict)] == [1, 4, 16]
            assert isinstance(results[2], RequestFailed)
            assert app.replicas[0].instance.sizes == [4, 1, 1, 1, 1]

    asyncio.run(body())


def test_a_batch_runs_when_it_is_full_and_in_a_thread_if_plain() -> None:
    graph, square = one(Batched, "square_in_thread", ["y"], batch=Batch(max=2, wait_ms=60_000))
    graph.output(y=square.y)

    async def body() -> None:
        async with deployed(graph) as app:
            session = AsyncSession(app.gateway)
            requests = [await session.submit(x=k) for k in (3, 4)]
            assert [(await r.result())["y"] for r in requests] == [9, 16]

    asyncio.run(body())


def test_a_batch_that_returns_too_few_fails_with_the_rule() -> None:
    graph, few = one(Batched, "too_few", ["y"], batch=Batch(max=1))
    graph.output(y=few.y)
    assert "was given a batch of 1 and must return a list as long" in failure_of(graph, x=1).failures["y"].cause


ON_LOOP = [
    (method, error)
    for method in ("on_loop", "stream_on_loop", "batch_on_loop")
    for error in (asyncio.CancelledError, StopIteration)
]
IN_THREAD = [(method, error) for method in ("in_thread", "stream_in_thread", "batch_in_thread") for error in Odd.errors]


@pytest.mark.parametrize(("method", "error"), [*ON_LOOP, *IN_THREAD])
def test_what_no_except_clause_expects_fails_its_request_and_no_other(method: str, error: type[BaseException]) -> None:
    output: Any = stream("y") if method.startswith("stream") else "y"
    batch = {"batch": Batch(max=2, wait_ms=5)} if method.startswith("batch") else {}
    graph, run = one(Odd, method, [output], **batch)
    graph.output(y=run.y)

    async def body() -> None:
        async with deployed(graph) as app:
            session = AsyncSession(app.gateway)
            requests = [await session.submit(x=x) for x in (Odd.errors.index(error), -1, Odd.errors.index(error), -1)]
            async with asyncio.timeout(30):
                results = await asyncio.gather(*(r.result() for r in requests), return_exceptions=True)
            assert [isinstance(result, RequestFailed) for result in results] == [True, False, True, False]

    asyncio.run(body())


def test_cancelling_a_request_cancels_async_and_plain_methods() -> None:
    graph = Graph("slow")
    x = graph.placeholder("x", int)
    slow = graph.role("r", Slow)
    wait = slow.interface("wait", inputs=[[x]], outputs=["y"])
    polls = slow.interface("polls", inputs=[[x]], outputs=["y"])
    forever = slow.interface("forever", inputs=[[x]], outputs=[stream("y")])
    graph.output(wait=wait.y, polls=polls.y, forever=forever.y)

    async def body() -> None:
        Slow.cancelled = threading.Semaphore(0)
        async with deployed(graph) as app:
            request = await AsyncSession(app.gateway).submit(x=1)
            assert await asyncio.to_thread(Slow.polling.wait, 10)
            seen = []
            async for name, value in request:
                seen.append((name, value))
                if len(seen) == 5:
                    assert await request.cancel()
            assert request.outcome == "cancelled"
            assert seen[:5] == [("forever", k) for k in range(5)]
            with pytest.raises(RequestFailed, match="cancelled"):
                await request.result()
            for _ in range(2):
                assert await asyncio.to_thread(Slow.cancelled.acquire, timeout=10)

    asyncio.run(body())


def test_a_deadline_ends_a_request_that_hangs() -> None:
    graph, slow = one(Slow, "wait", ["y"])
    graph.output(y=slow.y)

    async def body() -> None:
        async with deployed(graph) as app:
            request = await AsyncSession(app.gateway).submit(x=1, deadline=0.02)
            with pytest.raises(RequestFailed) as caught:
                await request.result()
            assert caught.value.outcome == "deadline"

    asyncio.run(body())


def test_arrays_pass_as_they_are_within_a_process(run: Run) -> None:
    graph = Graph("array")
    x = graph.placeholder("x", Tensor("float32", (None, 3)))
    echo = graph.role("r", Echo).interface("run", inputs=[[x]], outputs=["y"])
    graph.output(y=echo.y)
    array = np.ones((2, 3), np.float32)
    assert run(graph, x=array)["y"] is array
