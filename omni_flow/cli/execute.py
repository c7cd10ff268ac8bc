"""Requests from the command line: launch, send, show, and an exit code."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

import omni_flow
from omni_flow.cli import timeline
from omni_flow.cli.command import complain, stderr
from omni_flow.cli.errors import ExitCode, UserError
from omni_flow.cli.flags import Inputs
from omni_flow.cli.show import Show, kinds
from omni_flow.cli.target import Target
from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.request import Outcome
from omni_flow.control.runtime.client import Request, Session
from omni_flow.control.runtime.errors import RuntimeFault

EXIT = {Outcome.DONE: ExitCode.DONE, Outcome.CANCELLED: ExitCode.CANCELLED}


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for beside the inputs. `launch`: further options of `omni_flow.launch`."""

    out: Path
    params: Mapping[str, Any] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    deadline: float | None = None
    timeline: bool = False
    as_json: bool = False
    processes: bool = True
    launch: Mapping[str, Any] = field(default_factory=dict)


def execute(target: Target, graph: CompiledGraph, turns: Sequence[Inputs], options: Options) -> int:
    """Run requests, one after the other, in one session on a deployment of their own; the first that does not end well
    is the last. Files of several turns go to folders `1`, `2` and so on.

    Raises UserError: it can't be launched, or what is sent is wrong.
    """
    with _launched(target, graph, options) as app, app.session() as session:
        if len(turns) == 1:
            return _run(session, graph, turns[0], options)
        code: int = ExitCode.DONE
        for number, inputs in enumerate(turns, 1):
            if not options.as_json:
                print(f"turn {number}" if number == 1 else f"\nturn {number}")
            code = _run(session, graph, inputs, replace(options, out=options.out / str(number)))
            if code != ExitCode.DONE:
                break
        return code


def _run(session: Session, graph: CompiledGraph, inputs: Inputs, options: Options) -> int:
    """One request; its exit code."""
    show = Show(kinds(graph), options.out, None if options.as_json else sys.stdout)
    try:
        request = session.submit(
            deadline=options.deadline, params=options.params, timeline=options.timeline, **inputs.whole
        )
    except RuntimeFault as error:
        raise UserError(str(error)) from error
    feeders = _Feeders(request, inputs.streams)
    try:
        feeders.start()
        for name, value in request:
            show(name, value)
    except KeyboardInterrupt:
        request.cancel()
    except UserError:
        request.cancel()
        raise
    finally:
        outputs = show.finish()
    if feeders.error is not None:
        raise feeders.error
    _report(request, outputs, options)
    return EXIT.get(request.outcome or Outcome.CANCELLED, ExitCode.FAILED)


def _launched(target: Target, graph: CompiledGraph, options: Options) -> Any:
    """A deployment of the graph, up. What happens to replicas, now and later, is said on stderr."""
    from omni_flow.deploy.errors import LaunchError

    err = stderr()
    counts = {role.name: options.replicas.get(role.name, role.replicas) for role in graph.roles.values()}
    names = ", ".join(f"{role} ×{n}" if n > 1 else role for role, n in counts.items())
    started = time.monotonic()
    with err.status(f"starting {names}"):
        try:
            app = omni_flow.launch(
                target.graph,
                processes=options.processes,
                replicas=dict(options.replicas),
                target=target.place,
                on_event=lambda line: err.print(line, style="dim"),
                log_level="WARNING",
                **options.launch,
            )
        except LaunchError as error:
            raise UserError(str(error), code=ExitCode.FAILED) from error
    err.print(f"up in {time.monotonic() - started:.1f} s: {names}", style="dim")
    return app


def _report(request: Request, outputs: Mapping[str, Any], options: Options) -> None:
    """The outcome, the failures and the timeline: in words, or as one JSON object."""
    outcome = request.outcome or Outcome.CANCELLED
    failures = {name: str(failure) for name, failure in request.failures.items()}
    if options.as_json:
        found: dict[str, Any] = {"outcome": str(outcome), "outputs": outputs, "failures": failures}
        if options.timeline:
            found["timeline"] = timeline.as_rows(request.timeline())
        print(msgspec.json.encode(found, enc_hook=repr).decode())
    elif options.timeline and (spans := request.timeline()):
        print()
        timeline.show(spans, sys.stdout)
    if outcome is Outcome.DEADLINE:
        complain(f"the request met its deadline of {options.deadline:g} s")
    elif outcome is Outcome.CANCELLED:
        complain("cancelled")
    for name, cause in failures.items():
        complain(f"{name} failed: {cause}")


class _Feeders:
    """Threads that send streamed placeholders while outputs are being read. `error` is the first that one met."""

    def __init__(self, request: Request, streams: Mapping[str, Iterator[Any]]) -> None:
        self._request, self._streams = request, streams
        self.error: UserError | None = None

    def start(self) -> None:
        """Start one per stream. They are daemons: one may wait for stdin when the request is over."""
        for name, frames in self._streams.items():
            threading.Thread(target=self._feed, args=(name, frames), name=f"feed-{name}", daemon=True).start()

    def _feed(self, name: str, frames: Iterator[Any]) -> None:
        try:
            for frame in frames:
                if self._request.outcome is not None:
                    return
                self._request.send(name, frame)
            self._request.end(name)
        except (UserError, RuntimeFault) as error:
            if self._request.outcome is None:
                self.error = error if isinstance(error, UserError) else UserError(str(error))
                self._request.cancel()
