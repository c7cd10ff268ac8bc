"""Ends a process whose event loop no longer turns: role code that blocks inside `async def` would hang its requests."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable

_BEATS = 4  # per stall time


class Watchdog:
    """Watches the running loop from a thread. `on_stall(cause, trace)` is called there, and must not return.

    Should the thread not get to run either (code that keeps the interpreter's lock), the process is ended without it
    after half as long again, with every stack on standard error.
    """

    def __init__(self, stall_s: float, on_stall: Callable[[str, str], None]) -> None:
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beats = 0
        self._stopped = threading.Event()
        self._beat()
        threading.Thread(target=self._watch, name="omni-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        self._beats += 1
        faulthandler.dump_traceback_later(1.5 * self._stall_s, exit=True, file=sys.__stderr__ or 2)
        self._timer = self._loop.call_later(self._stall_s / _BEATS, self._beat)

    def _watch(self) -> None:
        seen, missed = -1, 0
        while not self._stopped.wait(self._stall_s / _BEATS):
            beats = self._beats
            missed = missed + 1 if beats == seen else 0
            seen = beats
            if missed >= _BEATS:
                frame = sys._current_frames().get(self._loop_thread)
                stack = traceback.extract_stack(frame)
                place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
                cause = f"its event loop did not turn for {self._stall_s:g} s: `async` role code blocks at {place}"
                self._on_stall(cause, "".join(traceback.format_list(stack)))
                return
