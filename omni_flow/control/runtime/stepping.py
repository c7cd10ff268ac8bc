"""A plain generator of role code, stepped in worker threads.

The thread that steps it is given back when the generator's credit is used up or others wait for a thread, so that a
generator which has to wait for its readers never holds what those readers need.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from omni_flow.control.runtime.methods import OutputPort

if TYPE_CHECKING:
    from omni_flow.control.runtime.execution import Execution, Running


class Stepper:
    """Steps one generator. All methods but `_step` run on the loop; at most one `_step` runs at a time."""

    def __init__(self, execution: Execution, running: Running) -> None:
        self._execution = execution
        self._running = running
        self._items: Iterator[Any] | None = None
        self._held: deque[tuple[OutputPort, Any]] = deque()
        self._stepping = False
        self._over = False
        self._error: BaseException | None = None
        self._stop = False

    def go_on(self) -> None:
        """Give what is held as far as credit allows, then let a thread make more."""
        running = self._running
        if running.activation.closed:
            return
        try:
            self._give()
        except Exception as wrong:
            self._stop = True
            self._execution.fail(running, wrong)
            self._release()
            return
        if self._held or self._stepping:
            return
        if self._over:
            if self._error is None:
                self._execution.finish(running)
            else:
                self._execution.fail(running, self._error)
            return
        if self._may_go_on():
            self._stepping = True
            self._execution.threads.submit(self._step)

    def _may_go_on(self) -> bool:
        running = self._running
        return all(running.share.may_give(running.activation, p.index) for p in running.method.ports if p.stream)

    def _give(self) -> None:
        running = self._running
        while self._held:
            port, value = self._held[0]
            if port.stream and not running.share.may_give(running.activation, port.index):
                return
            self._held.popleft()
            self._execution.give(running, port, value)

    def cancel(self) -> None:
        """The request is over: close the generator in a thread, as soon as it yields."""
        self._stop = True
        self._release()

    def _release(self) -> None:
        self._held.clear()
        if not self._stepping and not self._over:
            self._stepping = True
            self._execution.threads.submit(self._step)

    def _step(self) -> None:
        """In a thread: make one frame, or close the generator."""
        running, threads = self._running, self._execution.threads
        running.in_thread = True
        try:
            if not self._stop:
                if self._items is None:
                    running.started = time.time()
                    self._items = iter(self._call())
                try:
                    item = next(self._items)
                except StopIteration:
                    threads.post(lambda: self._stepped([], over=True, error=None))
                    return
                outputs = running.method.yielded(item)
                threads.post(lambda: self._stepped(outputs, over=False, error=None))
                return
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
            threads.post(lambda: self._stepped([], over=True, error=None))
        except SystemExit:
            raise
        except BaseException as error:  # a thread that died of one would leave everybody else waiting
            failure = error
            threads.post(lambda: self._stepped([], over=True, error=failure))
        finally:
            running.in_thread = False

    def _call(self) -> Iterable[Any]:
        running = self._running
        arguments = running.method.inputs.decode(running.activation.inputs)
        if running.method.takes_ctx:
            made: Iterable[Any] = running.method.call(self._execution.context(running), **arguments)
        else:
            made = running.method.call(**arguments)
        return made

    def _stepped(self, outputs: list[tuple[OutputPort, Any]], over: bool, error: BaseException | None) -> None:
        self._stepping = False
        self._over = over
        self._error = error
        self._held.extend(outputs)
        if self._stop and not over:
            self._release()
            return
        self.go_on()
