"""Running activations: on the loop for `async` methods, in worker threads for the others, in batches where declared.

Runners are long-lived tasks that take activations from one queue. One runner works through all that a loop tick brought
without a task per activation; when role code suspends inside it, another runner takes over the queue.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omni_flow.control.activations import Activations
from omni_flow.control.context import Context, seed_for
from omni_flow.control.facts import Message
from omni_flow.control.host import Activation
from omni_flow.control.runtime.batching import Batcher
from omni_flow.control.runtime.methods import Method, OutputPort
from omni_flow.control.runtime.stepping import Stepper
from omni_flow.control.runtime.threads import Threads
from omni_flow.control.runtime.wire import LINEAGE, PREFIX, TIMELINE

if TYPE_CHECKING:
    from omni_flow.control.runtime.party import Party
    from omni_flow.control.runtime.replica import Replica


class Running:
    """One activation while it runs: its shares' shell, its context and whoever waits for its credit."""

    __slots__ = (
        "activation",
        "beside",
        "context",
        "in_thread",
        "method",
        "note",
        "party",
        "queued",
        "runner",
        "share",
        "started",
        "stepper",
        "waiter",
    )

    def __init__(self, party: Party, share: Activations, activation: Activation, method: Method) -> None:
        self.party = party
        self.share = share
        self.activation = activation
        self.method = method
        self.context: Context | None = None
        self.runner: asyncio.Task[None] | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.stepper: Stepper | None = None
        self.queued = time.time() if party.info.timeline else 0.0
        self.started = 0.0
        self.in_thread = False
        self.beside: Sequence[Running] = ()
        """Who shares its call in a thread, itself among them."""
        self.note = ""

    # ---- what its context is asked; see `Facts` --------------------------------------------------------------

    def path(self) -> str:
        return self.party.node.plan.show(self.activation.interface.scope, self.activation.path)

    def seed(self) -> int:
        return seed_for(self.party.info.seed, self.activation.interface.name, self.activation.path)

    def retries(self) -> int:
        return self.activation.interface.spec.retries

    def params(self) -> SimpleNamespace:
        return SimpleNamespace(**self.party.info.params)

    def iteration(self) -> tuple[int, bool]:
        return self.party.replica.iteration(self.activation.interface, self.activation)

    def progress(self, fraction: float, note: str) -> None:
        """Keep what role code said last; the timeline shows it."""
        self.note = note

    def prefix(self, pool: str, marks: Sequence[tuple[int, bytes]]) -> None:
        """Tell the gateway, if it balances by what replicas have cached."""
        if self.party.replica.role.spec.balance == "cache_aware":
            self._tell_gateway(PREFIX, (pool, marks))

    def lineage(self) -> int:
        return self.party.info.lineage.get(self.party.replica.role.id, 0)

    def advance(self, lineage: int) -> None:
        """Tell the gateway how far the session has come, if there is one."""
        if self.party.info.session is not None:
            self._tell_gateway(LINEAGE, lineage)

    def _tell_gateway(self, kind: int, value: Any) -> None:
        """From any thread, and nothing once the request is over."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # in a worker thread
            self.party.node.loop.call_soon_threadsafe(self._to_gateway, kind, value)
        else:
            self._to_gateway(kind, value)

    def _to_gateway(self, kind: int, value: Any) -> None:
        if not self.party.over:
            self.party.to_gateway(Message(kind, self.party.replica.role.id, (), 0, value))


class Execution:
    """Runs the activations of one replica."""

    def __init__(self, replica: Replica, threads: int) -> None:
        self.replica = replica
        self.node = replica.node
        self.methods: list[Method] = []
        self.threads = Threads(self.node.loop, threads, f"omni-{replica.role.spec.name}")
        self._queue: deque[Running] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._runners: set[asyncio.Task[None]] = set()
        self._awake = False
        self.closed = False
        self._batchers: dict[int, Batcher] = {}

    # ---- from the shares ------------------------------------------------------------------------------------

    def start(self, party: Party, share: Activations, activation: Activation) -> None:
        """Run an activation soon."""
        method = self.methods[activation.interface.index]
        running = activation.context = Running(party, share, activation, method)
        if method.batch is not None:
            self._batcher(method).add(running)
        elif method.asynchronous:
            self._queue.append(running)
            if not self._awake:
                self._wake()
        else:
            self._start_thread(running)

    def resume(self, activation: Activation) -> None:
        """Credit came back to a stream of `activation`."""
        running: Running = activation.context
        if running.waiter is not None and not running.waiter.done():
            running.waiter.set_result(None)
        if running.stepper is not None:
            running.stepper.go_on()

    def cancel(self, activation: Activation) -> Running:
        """The request of `activation` is over: stop it, and let go at once of what it was given."""
        running: Running = activation.context
        activation.context = None
        activation.inputs = {}
        if running.context is not None:
            running.context.cancel()
        if running.runner is not None:
            running.runner.cancel()
        if running.stepper is not None:
            running.stepper.cancel()
        return running

    # ---- the loop's runners ---------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._awake = True
        if self._idle:
            self._idle.pop().set_result(None)
        else:
            task = self.node.loop.create_task(self._run_queue())
            self._runners.add(task)
            task.add_done_callback(self._runners.discard)
        self.node.loop.call_soon(self._relieve)

    def _relieve(self) -> None:
        """Called right after a runner's turn: if the queue is not empty, role code suspended it. Wake another.

        What role code said before it suspended is sent now: the runner itself flushes only when its queue is empty.
        """
        self._awake = False
        self.node.flush()
        if self._queue:
            self._wake()

    async def _run_queue(self) -> None:
        task = asyncio.current_task()
        while True:
            given: Any = None
            while self._queue:
                running = self._queue.popleft()
                given = None  # the next method may run for long
                if not running.activation.closed:
                    running.runner = task
                    given = await self._run(running)
                    running.runner = None
                del running
                if self._queue and not self._awake:
                    self._awake = True
                    self.node.loop.call_soon(self._relieve)
            self.node.flush()
            del given  # its outputs have gone out; an idle runner must not hold what its last activation was given
            waiter: asyncio.Future[None] = self.node.loop.create_future()
            self._idle.append(waiter)
            await waiter

    async def _run(self, running: Running) -> Mapping[str, Any] | None:
        """One activation of an `async` method. Whatever role code raises becomes its failure.

        Returns what it was given, if it has outputs to send before that is released.
        """
        try:
            method, activation = running.method, running.activation
            arguments = method.inputs.decode(activation.inputs)
            if running.party.info.timeline:
                running.started = time.time()
            if method.takes_ctx:
                result = method.call(self.context(running), **arguments)
            else:
                result = method.call(**arguments)
            if not method.streams:
                result = await result
                if not activation.closed:
                    for port, value in method.returned(result):
                        self.give(running, port, value)
            else:
                await self._stream(running, result)
        except asyncio.CancelledError:
            if not running.activation.closed:
                self.fail(running, asyncio.CancelledError("role code raised CancelledError"))
            elif self.closed:
                raise
            elif running.runner is not None:
                running.runner.uncancel()
            return None
        except Exception as error:
            self.fail(running, error)
            return None
        self.finish(running)
        return arguments

    async def _stream(self, running: Running, result: Any) -> None:
        items: AsyncIterator[Any] = result if hasattr(result, "__anext__") else await result
        try:
            async for item in items:
                for port, value in running.method.yielded(item):
                    while port.stream and not running.share.may_give(running.activation, port.index):
                        self.node.schedule_flush()
                        running.waiter = self.node.loop.create_future()
                        await running.waiter
                    if running.activation.closed:
                        return
                    self.give(running, port, value)
        finally:
            aclose = getattr(items, "aclose", None)
            if aclose is not None:
                await aclose()

    # ---- threads --------------------------------------------------------------------------------------------

    def _start_thread(self, running: Running) -> None:
        if running.method.streams:
            running.stepper = Stepper(self, running)
            running.stepper.go_on()
        else:
            self.threads.submit(lambda: self._call_in_thread(running))

    def _call_in_thread(self, running: Running) -> None:
        if running.activation.closed:
            return
        started = time.time()
        running.in_thread = True
        try:
            arguments = running.method.inputs.decode(running.activation.inputs)
            if running.method.takes_ctx:
                result = running.method.call(self.context(running), **arguments)
            else:
                result = running.method.call(**arguments)
            outputs = running.method.returned(result)
        except SystemExit:
            raise
        except BaseException as error:  # a thread that died of one would leave everybody else waiting
            failure = error
            self.threads.post(lambda: self._thread_done(running, started, [], failure))
        else:
            self.threads.post(lambda: self._thread_done(running, started, outputs, None))
        finally:
            running.in_thread = False

    def _thread_done(
        self, running: Running, started: float, outputs: list[tuple[OutputPort, Any]], error: BaseException | None
    ) -> None:
        running.started = started
        if running.activation.closed:
            return
        if error is None:
            try:
                for port, value in outputs:
                    self.give(running, port, value)
            except Exception as wrong:
                error = wrong
        if error is None:
            self.finish(running)
        else:
            self.fail(running, error)

    # ---- batches --------------------------------------------------------------------------------------------

    def _batcher(self, method: Method) -> Batcher:
        batcher = self._batchers.get(method.interface.index)
        if batcher is None:
            batcher = self._batchers[method.interface.index] = Batcher(self, method)
        return batcher

    # ---- what role code says --------------------------------------------------------------------------------

    def context(self, running: Running) -> Context:
        """The `ctx` of an activation."""
        if running.context is None:
            party = running.party
            running.context = Context(
                running,
                interface=running.activation.interface.name,
                request=f"{party.info.gateway}/{party.info.number}",
                session=party.info.session,
                tenant=party.info.tenant,
                deadline=party.deadline,
                data=self.replica.data,
                log=self.replica.log,
            )
        return running.context

    def give(self, running: Running, port: OutputPort, value: Any) -> None:
        """Say one output. Raises WrongValue, NotSerialisable or RoleError."""
        name = running.activation.interface.name
        payload, size = self.node.values.encode(value, port.type, name, port.field, port.spills)
        running.party.note(payload)
        running.share.give(running.activation, port.index, payload, size)
        if not self._awake:
            self.node.schedule_flush()

    def finish(self, running: Running) -> None:
        """The method returned."""
        if running.activation.closed:
            return
        running.share.finish(running.activation)
        self._ended(running)

    def fail(self, running: Running, error: BaseException) -> None:
        """The method, or a rule of its outputs, raised."""
        if running.activation.closed:
            return
        interface = running.activation.interface
        place = self.node.plan.show(interface.scope, running.activation.path)
        self.replica.log.warning("%s[%s] failed: %r", interface.name, place, error, exc_info=error)
        running.share.fail(running.activation, f"{type(error).__name__}: {error}")
        self._ended(running)

    def _ended(self, running: Running) -> None:
        self.replica.activations += 1
        running.activation.context = None
        running.context = None  # it refers to `running`; a cycle would hold the arrays given until the collector comes
        if running.party.info.timeline:
            stamp = (self.replica.id, running.queued, running.started, time.time(), running.note)
            activation = running.activation
            running.party.to_gateway(Message(TIMELINE, activation.interface.id, activation.path, 0, stamp))
        if not self._awake:
            self.node.schedule_flush()

    def end_session(self, session: str, tenant: str) -> None:
        """Tell the role, if it has a method `end_session`: on the loop if that is `async`, else in its thread."""
        method = getattr(self.replica.instance, "end_session", None)
        if inspect.iscoroutinefunction(method):
            task = self.node.loop.create_task(self._end_on_loop(method, session, tenant))
            self._runners.add(task)
            task.add_done_callback(self._runners.discard)
        elif method is not None:
            self.threads.submit(lambda: self._end_in_thread(method, session, tenant))

    async def _end_on_loop(self, method: Callable[[str, str], Awaitable[None]], session: str, tenant: str) -> None:
        try:
            await method(session, tenant)
        except Exception:
            self.replica.log.exception("end_session raised")

    def _end_in_thread(self, method: Callable[[str, str], None], session: str, tenant: str) -> None:
        try:
            method(session, tenant)
        except SystemExit:
            raise
        except BaseException:  # a thread that died of one would leave everybody else waiting
            self.replica.log.exception("end_session raised")

    def close(self) -> None:
        """End runners and threads."""
        self.closed = True
        self._queue.clear()
        for task in self._runners:
            task.cancel()
        self.threads.close()
