"""Dynamic batching: activations of one interface, of whatever requests, in one call of its method.

The method gets lists and returns a list as long. What goes together, and what a call that raised comes to, is in
`control/batches.py`; here are the clock, the task and the thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_flow.control.batches import Arguments, Waiting, alike, answered
from omni_flow.control.host import RoleError
from omni_flow.control.runtime.methods import Method

if TYPE_CHECKING:
    from omni_flow.control.runtime.execution import Execution, Running

Item = tuple["Running", Arguments]


class Batcher:
    """Collects activations until `max` are there or the first has waited `wait_ms`, then runs them together.

    Activations that were given different parameters (an optional input absent in one of them) go in separate calls.
    """

    def __init__(self, execution: Execution, method: Method) -> None:
        assert method.batch is not None
        self._execution = execution
        self._method = method
        self._wait_s = method.batch.wait_ms / 1e3
        self._waiting: Waiting[Running] = Waiting(method.batch.max)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, running: Running) -> None:
        """Take one activation."""
        if self._waiting.add(running):
            self._dispatch()
        elif self._timer is None:
            loop = self._execution.node.loop
            self._timer = loop.call_later(self._wait_s, self._dispatch)

    def _dispatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items: list[Item] = []
        for running in self._waiting.take():
            if running.activation.closed:
                continue
            try:
                arguments = self._method.inputs.decode(running.activation.inputs)
            except Exception as wrong:
                self._execution.fail(running, wrong)
                continue
            running.started = time.time()
            items.append((running, arguments))
        for call in alike(items):
            task = self._execution.node.loop.create_task(self._run(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, items: Sequence[Item]) -> None:
        calls = [items]
        while calls:
            going = [item for item in calls.pop(0) if not item[0].activation.closed]
            if not going:
                continue
            answer = answered(going, await self._call(going))
            calls += answer.again
            for (running, _), error in answer.raised:
                self._execution.fail(running, error)
            for (running, _), result in answer.said:
                self._say(running, result)

    def _say(self, running: Running, result: Any) -> None:
        if running.activation.closed:
            return
        try:
            for port, value in self._method.returned(result):
                self._execution.give(running, port, value)
        except Exception as wrong:
            self._execution.fail(running, wrong)
        else:
            self._execution.finish(running)

    async def _call(self, items: Sequence[Item]) -> Sequence[Any] | BaseException:
        """The result of each item, or what the call raised."""
        method = self._method
        columns = {name: [arguments[name] for _, arguments in items] for name in items[0][1]}
        contexts = [[self._execution.context(running) for running, _ in items]] if method.takes_ctx else []
        if method.asynchronous:
            results = await self._on_loop(contexts, columns)
        else:
            results = await self._in_thread([running for running, _ in items], contexts, columns)
        if isinstance(results, BaseException):
            return results
        if not isinstance(results, Sequence) or isinstance(results, (str, bytes)) or len(results) != len(items):
            return RoleError(
                f"{method.interface.name} was given a batch of {len(items)} and must return a list as long, "
                f"not {type(results).__name__}"
            )
        return results

    async def _on_loop(self, contexts: list[Any], columns: Mapping[str, list[Any]]) -> Any:
        try:
            return await self._method.call(*contexts, **columns)
        except asyncio.CancelledError as error:
            if self._execution.closed:
                raise
            return error
        except Exception as error:
            return error

    async def _in_thread(self, going: Sequence[Running], contexts: list[Any], columns: Mapping[str, list[Any]]) -> Any:
        future: asyncio.Future[Any] = self._execution.node.loop.create_future()
        threads = self._execution.threads

        def settle(answer: Any) -> None:
            if not future.done():
                future.set_result(answer)

        def work() -> None:
            answer: Any
            for running in going:
                running.beside, running.in_thread = going, True
            try:
                answer = self._method.call(*contexts, **columns)
            except SystemExit:
                raise
            except BaseException as error:  # a thread that died of one would leave everybody else waiting
                answer = error
            finally:
                for running in going:
                    running.beside, running.in_thread = (), False
            threads.post(lambda: settle(answer))

        threads.submit(work)
        return await future
