"""`SGLangEngine`: the engine seam over an engine process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import IO, ClassVar

import msgspec
import numpy as np

from omni_flow.compute import errors
from omni_flow.compute.engine import EndEvent, Event, Floats, Layout, Request, Span, TokenEvent
from omni_flow.compute.errors import BadRequest, ComputeError, EngineDied, EngineFailed, SessionClosed
from omni_flow.compute.sglang.admission import admit, admit_prompt, admit_rows, admit_session, require
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.fixed_client import FixedSession
from omni_flow.compute.sglang.shared_rows import RowsFile, SharedRows
from omni_flow.compute.sglang.wire import (
    AskStats,
    Cancel,
    End,
    EndSession,
    FixedClose,
    FixedOpen,
    FixedOpened,
    FixedOut,
    Frames,
    Generate,
    Media,
    Ready,
    Refused,
    Shutdown,
    Stats,
    Step,
    ToEngine,
    frame,
    from_engine,
)
from omni_flow.compute.steps import MakeStepHook, reference

log = logging.getLogger("omni_flow.compute")
CLOSE_GRACE_S = 10.0
"""How long an engine that was told to end may take to take that in, and then to end, before it is killed."""


def _floats(raw: bytes) -> Floats:
    return np.frombuffer(raw, np.float32)


def _media(layout: Layout) -> list[Media]:
    return [
        Media(span.start, span.length, span.digest, np.ascontiguousarray(rows).tobytes())
        for span, rows in zip(layout.media, layout.embeddings, strict=True)
    ]


def _events(step: Step) -> list[TokenEvent]:
    events = []
    for at, token in enumerate(step.tokens):
        events.append(
            TokenEvent(
                token,
                step.logprobs[at] if at < len(step.logprobs) else None,
                tuple(step.top[at]) if at < len(step.top) else (),
                _floats(step.logits[at]) if at < len(step.logits) else None,
                _floats(step.hidden[at]) if at < len(step.hidden) else None,
                step.emitted[at] if at < len(step.emitted) else None,
            )
        )
    return events


class SGLangEngine:
    """One model in one engine process. See `omni_flow.compute.engine.Engine` for the contract.

    Args:
        config: what the process runs.
        step_hook: makes the model's step hook in the engine process, see `omni_flow.compute.steps`.
        start_timeout: seconds until it must be ready.
    """

    def __init__(
        self, config: EngineConfig, *, step_hook: MakeStepHook | None = None, start_timeout: float = 600.0
    ) -> None:
        if step_hook is not None:
            config = msgspec.structs.replace(config, hidden=True, overlap=False, step_hook=reference(step_hook))
        self.config = config
        self._timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._streams: dict[int, asyncio.Queue[Event | ComputeError]] = {}
        self._fixed: dict[int, FixedSession] = {}
        self._rows: RowsFile | None = None
        self._stats: dict[int, asyncio.Future[Mapping[str, int]]] = {}
        self._unsent: list[bytes] = []
        self._next = 0
        self._died: ComputeError | None = None
        self.ready: Ready

    program: ClassVar[str] = "omni_flow.compute.sglang.worker"
    """The module that is run as the engine process."""

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        if self._process is None:
            raise EngineDied("the engine is not started", "call start()")
        return self._process.pid

    @property
    def failure(self) -> ComputeError | None:
        """Why it has ended; None while it lives, or has not been started."""
        return self._died

    async def ended(self) -> None:
        """Wait until the engine process has ended."""
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    async def start(self) -> None:
        try:
            ours = self._start_process()
        except OSError as error:
            raise EngineFailed("the engine process can't be started", str(error)) from error
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
        self._ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader))
        try:
            async with asyncio.timeout(self._timeout):
                self.ready = await asyncio.shield(self._ready)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise EngineFailed(f"the engine was not ready within {self._timeout} s", self._output()) from error
            raise
        for line in self.ready.warnings:
            log.warning("engine %d: %s", self.pid, line)

    def _start_process(self) -> socket.socket:
        """Our end of its socket. Raises OSError; nothing is left then."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                for sock in (ours, theirs):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
                self._errors = undo.enter_context(tempfile.TemporaryFile())
                rows = RowsFile()
                undo.callback(rows.close)
                self._process = self._spawn(theirs, rows)
            self._rows = rows
            undo.pop_all()
            return ours

    def _spawn(self, theirs: socket.socket, rows: RowsFile) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            self.program,
            str(theirs.fileno()),
            str(rows.fd),
            msgspec.json.encode(self.config).decode(),
        ]
        # what this process can import the engine process can import, step hooks above all
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        if self.config.threads:
            environment["OMP_NUM_THREADS"] = str(self.config.threads)
        return subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), rows.fd),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env=environment,
        )

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        require("request", request, Request)
        asked = ("asked", time.monotonic_ns())
        if request.steps is not None and not self.config.step_hook:
            raise BadRequest("steps were asked for, the engine has no step hook", "start it with one")
        self._check_alive()
        layout = admit(request, self.ready)
        if request.hidden and not self.config.hidden:
            raise BadRequest("hidden states were asked for, the engine keeps none", "start it with hidden=True")
        self._next = number = self._next + 1
        queue: asyncio.Queue[Event | ComputeError] = asyncio.Queue()
        self._streams[number] = queue
        ended = False
        admitted, came = ("admitted", time.monotonic_ns()), 0
        try:
            await self._send(
                Generate(
                    number,
                    layout.ids.tobytes(),
                    _media(layout),
                    request.sampling,
                    request.tenant,
                    request.logits,
                    request.hidden,
                    request.prompt_logprobs,
                    request.priority,
                    None if request.steps is None else dict(request.steps),
                    request.session,
                    request.timeline,
                    request.stream or request.timeline or request.logits or request.hidden or request.steps is not None,
                )
            )
            while not ended:
                event = await queue.get()
                came = came or time.monotonic_ns()
                ended = not isinstance(event, TokenEvent)
                if isinstance(event, ComputeError):
                    raise event
                if isinstance(event, EndEvent) and request.timeline:
                    whole = (asked, admitted, *event.timeline, ("first_token", came))
                    event = replace(event, timeline=whole)
                yield event
        finally:
            del self._streams[number]
            if not ended and self._died is None:
                self._post(Cancel(number))

    @asynccontextmanager
    async def fixed_rows(
        self, context: Sequence[Span], rows: int, *, placeholder: int = 0, tenant: bytes = b""
    ) -> AsyncGenerator[FixedSession, None]:
        self._check_alive()
        layout = admit_prompt("context", context, self.ready)
        admit_rows(rows, placeholder, tenant, self.ready)
        self._next = number = self._next + 1
        assert self._rows is not None
        at = self._rows.place(rows, self.ready.hidden)
        shared = SharedRows(self._rows.fd, at, rows, self.ready.hidden)
        self._fixed[number] = session = FixedSession(number, shared, self._post, self._drain)
        try:
            await session.open(FixedOpen(number, layout.ids.tobytes(), _media(layout), rows, placeholder, tenant, at))
            yield session
        finally:
            del self._fixed[number]
            session.end(SessionClosed("this fixed-row session was left", "open another"))
            if self._died is None:
                self._post(FixedClose(number))

    async def end_session(self, session: str) -> None:
        admit_session(session)
        if session and self._died is None and self._writer is not None:
            self._post(EndSession(session))

    async def stats(self) -> Mapping[str, int]:
        self._check_alive()
        self._next = number = self._next + 1
        answer: asyncio.Future[Mapping[str, int]] = asyncio.get_running_loop().create_future()
        self._stats[number] = answer
        await self._send(AskStats(number))
        return await answer

    async def close(self) -> None:
        if self._process is None:
            return
        if self._writer is not None:
            if self._died is None:
                self._post(Shutdown())
                self._flush()
                self._died = EngineDied("the engine is closed", "start another")
            self._writer.close()
        if self._reading is not None:
            # an engine that hangs does not take in what is still to be sent
            await asyncio.wait((self._reading,), timeout=CLOSE_GRACE_S)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._process.wait, CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        self._process, self._writer = None, None
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    async def __aenter__(self) -> SGLangEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_alive(self) -> None:
        """Raises EngineDied: it has ended, or was not started."""
        if self._died is not None or self._writer is None:
            raise self._died or EngineDied("the engine is not started", "call start()")

    def _post(self, message: ToEngine) -> None:
        """Send with everything else that is sent in this turn of the loop: requests that come together should be seen
        together, or the first runs in a batch of its own. Raises BadRequest: it can't be written as a message."""
        try:
            data = frame(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise BadRequest(f"a request that is no message: {wrong}", "give plain values and valid Unicode") from None
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(data)

    async def _send(self, message: ToEngine) -> None:
        self._check_alive()
        self._post(message)
        await self._drain()

    async def _drain(self) -> None:
        assert self._writer is not None
        try:
            await self._writer.drain()
        except ConnectionError:
            raise self._died or EngineDied(self._end(), self._output()) from None

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._writer is not None and unsent:
            self._writer.write(b"".join(unsent))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        try:
            while data := await reader.read(1 << 20):
                for body in frames.feed(data):
                    self._handle(from_engine.decode(body))
        except ConnectionError:
            pass  # the same end as an empty read
        self._fail(EngineDied(self._end(), self._output()))

    def _handle(self, message: object) -> None:
        if isinstance(message, Step | End):
            queue = self._streams.get(message.number)
            if queue is None:
                return
            if isinstance(message, Step):
                for event in _events(message):
                    queue.put_nowait(event)
                return
            queue.put_nowait(
                EndEvent(
                    message.reason,
                    message.prompt_tokens,
                    message.cached_tokens,
                    message.tokens,
                    tuple(message.prompt_logprobs),
                    message.hits,
                    tuple(message.marks),
                    tuple(message.timeline),
                )
            )
        elif isinstance(message, Refused):
            kind = getattr(errors, message.kind, ComputeError)
            error = kind(message.message, message.mend)
            if message.number == 0:
                self._fail(error)
            elif (queue := self._streams.get(message.number)) is not None:
                queue.put_nowait(error)
            elif (session := self._fixed.get(message.number)) is not None:
                session.answered(error)
        elif isinstance(message, FixedOpened | FixedOut):
            if (session := self._fixed.get(message.number)) is not None:
                session.answered(message)
        elif isinstance(message, Ready):
            assert self._ready is not None
            self._ready.set_result(message)
        elif isinstance(message, Stats):
            answer = self._stats.pop(message.number)
            if not answer.done():
                answer.set_result(message.counts)

    def _fail(self, error: ComputeError) -> None:
        if self._died is None:
            self._died = error
        for queue in self._streams.values():
            queue.put_nowait(self._died)
        for session in self._fixed.values():
            session.end(self._died)
        for answer in self._stats.values():
            if not answer.done():
                answer.set_exception(self._died)
        self._stats.clear()
        if self._ready is not None and not self._ready.done():
            if isinstance(error, EngineDied):
                error = EngineFailed(error.message, error.mend)
            self._ready.set_exception(error)

    def _end(self) -> str:
        status = self._process.poll() if self._process is not None else None
        return "the engine process ended" + (f" with status {status}" if status is not None else "")

    def _output(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        return "its output: " + self._errors.read().decode(errors="replace")
