"""Dynamic batching: activations of one interface, of whatever requests, in one call of its method.

The method gets lists and returns a list as long. Items are independent: a call that raises is run again item by item,
so only items that raise alone fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_flow.control.runtime.methods import Method
from omni_flow.control.share import RoleError

if TYPE_CHECKING:
    from omni_flow.control.runtime.execution import Execution, Running

Arguments = Mapping[str, Any]


class Batcher:
    """Collects activations until `max` are there or the first has waited `wait_ms`, then runs them together.

    Activations that were given different parameters (an optional input absent in one of them) go in separate calls.
    """

    def __init__(self, execution: Execution, method: Method) -> None:
        assert method.batch is not None
        self._execution = execution
        self._method = method
        self._max = method.batch.max
        self._wait_s = method.batch.wait_ms / 1e3
        self._waiting: list[Running] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, running: Running) -> None:
        """Take one activation."""
        self._waiting.append(running)
        if len(self._waiting) >= self._max:
            self._dispatch()
        elif self._timer is None:
            loop = self._execution.node.loop
            self._timer = loop.call_later(self._wait_s, self._dispatch)

    def _dispatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        groups: dict[frozenset[str], list[tuple[Running, Arguments]]] = {}
        for running in batch:
            if running.activation.closed:
                continue
            try:
                arguments = self._method.inputs.decode(running.activation.inputs)
            except Exception as wrong:
                self._execution.fail(running, wrong)
                continue
            running.started = time.time()
            groups.setdefault(frozenset(arguments), []).append((running, arguments))
        for items in groups.values():
            task = self._execution.node.loop.create_task(self._run(items))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, items: list[tuple[Running, Arguments]]) -> None:
        try:
            results = await self._call(items)
        except Exception as error:
            if len(items) == 1:
                self._execution.fail(items[0][0], error)
            else:
                for item in items:
                    await self._run([item])
            return
        for (running, _), result in zip(items, results, strict=True):
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

    async def _call(self, items: list[tuple[Running, Arguments]]) -> Sequence[Any]:
        method = self._method
        names = items[0][1]
        columns = {name: [arguments[name] for _, arguments in items] for name in names}
        contexts = [[self._execution.context(running) for running, _ in items]] if method.takes_ctx else []
        if method.asynchronous:
            results = await method.call(*contexts, **columns)
        else:
            results = await self._in_thread(contexts, columns)
        if not isinstance(results, Sequence) or isinstance(results, (str, bytes)) or len(results) != len(items):
            raise RoleError(
                f"{method.interface.name} was given a batch of {len(items)} and must return a list as long, "
                f"not {type(results).__name__}"
            )
        return results

    async def _in_thread(self, contexts: list[Any], columns: Mapping[str, list[Any]]) -> Any:
        future: asyncio.Future[Any] = self._execution.node.loop.create_future()
        threads = self._execution.threads

        def settle(result: Any, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def work() -> None:
            try:
                result = self._method.call(*contexts, **columns)
            except Exception as error:
                failure = error
                threads.post(lambda: settle(None, failure))
            else:
                threads.post(lambda: settle(result, None))

        threads.submit(work)
        return await future
