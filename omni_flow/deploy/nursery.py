"""The nursery: a small one-threaded process that forks the workers of a deployment and sees them end.

It has the graph, either inherited (forked from the launching process: closures, local classes and notebooks work) or
imported once from a target in a fresh interpreter (robust with CUDA and thread pools). It outlives its launcher only to
end the workers, and its workers do not outlive it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from omni_flow.control.plan import Plan
from omni_flow.deploy import messages
from omni_flow.deploy.forking import die_with_parent, end_group, forked
from omni_flow.deploy.messages import Exited, Setup, Signal, Start, Started, Stop, Word
from omni_flow.deploy.rundir import remove
from omni_flow.deploy.worker import run_worker

ORPHAN_GRACE_S = 0.4
"""What workers get to end by themselves after the launcher has died."""


def names_of(plan: Plan) -> str:
    """A digest of a plan's names and their order: two processes must agree on it to talk by index."""
    digest = hashlib.sha256()
    for names in (
        [role.spec.name for role in plan.roles],
        [interface.name for interface in plan.interfaces],
        [field.name for field in plan.fields],
        [source.name for source in plan.sources],
        [output.name for output in plan.outputs],
    ):
        digest.update(msgspec.msgpack.encode(names))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Worker:
    start: Start
    pid: int
    pidfd: int
    report: int


class Nursery:
    """The loop of the process. Ends when told to, or with the launcher."""

    def __init__(self, sock: socket.socket, lock: int, launcher: int, plan: Plan) -> None:
        self._sock = sock
        self._lock = lock
        self._plan = plan
        self._workers: dict[int, _Worker] = {}
        self._setup = Setup("", "")
        self._deadline: float | None = None
        self._orphaned = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, self._on_order)
        self._launcher = -1
        with contextlib.suppress(ProcessLookupError):  # it is gone: the socket says so too
            self._launcher = os.pidfd_open(launcher)
            self._selector.register(self._launcher, selectors.EVENT_READ, self._on_orphaned)

    def serve(self) -> int:
        """Run until all is over. The exit status."""
        while self._deadline is None or self._workers:
            timeout = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
            ready = self._selector.select(timeout)
            for key, _ in ready:
                key.data()
            if not ready and self._deadline is not None:
                self._signal_all(signal.SIGKILL)
                self._deadline += 3600.0  # nothing more can be done but wait for the kernel
        if self._orphaned and self._setup.run_dir:
            remove(self._setup.run_dir)
        return 0

    # ---- the launcher ---------------------------------------------------------------------------------------

    def _on_order(self) -> None:
        try:
            packet = self._sock.recv(messages.PACKET)
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._on_orphaned()
            return
        order = messages.decode_order(packet)
        if isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Signal):
            if any(worker.pid == order.pid for worker in self._workers.values()):
                os.kill(order.pid, order.signum)
        elif isinstance(order, Setup):
            self._setup = order
        else:
            self._end(order)

    def _on_orphaned(self) -> None:
        """The launcher is gone, whatever killed it: nobody needs the workers any more."""
        if self._orphaned:  # both the socket and the process say so
            return
        self._orphaned = True
        self._selector.unregister(self._sock)
        if self._launcher >= 0:
            self._selector.unregister(self._launcher)
        self._end(Stop(ORPHAN_GRACE_S))

    def _end(self, stop: Stop) -> None:
        deadline = time.monotonic() + stop.grace_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, signum: signal.Signals) -> None:
        for worker in self._workers.values():
            os.kill(worker.pid, signum)

    def _say(self, word: Word) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the launcher's end is an event of its own
            self._sock.send(messages.encode(word))

    # ---- workers --------------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        if self._deadline is not None:
            return
        report, said = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pid = forked([said], functools.partial(self._work, os.getpid(), start, said))
        os.close(said)
        worker = _Worker(start, pid, os.pidfd_open(pid), report)
        self._workers[pid] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, functools.partial(self._on_exit, worker))
        self._say(Started(start.place, start.epoch, pid))

    def _work(self, parent: int, start: Start, report: int) -> int:
        die_with_parent(parent)
        return run_worker(self._plan, self._setup, start, report)

    def _on_exit(self, worker: _Worker) -> None:
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        end_group(worker.pid)
        _, wait_status = os.waitpid(worker.pid, 0)
        del self._workers[worker.pid]
        cause, trace = _last_words(worker.report)
        os.close(worker.report)
        status = os.waitstatus_to_exitcode(wait_status)
        self._say(Exited(worker.start.place, worker.start.epoch, worker.pid, status, cause, trace))


def _last_words(report: int) -> tuple[str, str]:
    try:
        said = os.read(report, messages.REPORT_BYTES)
    except BlockingIOError:  # a process of the worker's own still holds the pipe
        said = b""
    if not said:
        return "", ""
    try:
        ending = messages.decode_ending(said)
    except msgspec.DecodeError as error:  # two threads spoke at once
        return f"its last words are garbled: {error}", ""
    return ending.cause, ending.trace


def serve_plan(sock: socket.socket, lock: int, launcher: int, plan: Plan) -> int:
    """The process's life once it has the plan."""
    sock.send(messages.encode(messages.Ready(names_of(plan))))
    return Nursery(sock, lock, launcher, plan).serve()


def fork_nursery(plan: Plan, sock: socket.socket, lock: int) -> int:
    """Fork a nursery from this process. `sock` is its end of the pair. Returns its pid.

    From a thread made for it: an OpenMP that has run in the forking thread believes in the child, too, that its threads
    are there, and waits for them for ever.
    """
    launcher = os.getpid()
    serve: Callable[[], int] = functools.partial(serve_plan, sock, lock, launcher, plan)
    with ThreadPoolExecutor(1, "fork") as thread:
        return thread.submit(forked, [sock.fileno(), lock], serve).result()


def main() -> int:
    """Entry point of a nursery in a fresh interpreter."""
    parser = argparse.ArgumentParser(prog="omni-flow-nursery")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--target", required=True)
    options = parser.parse_args()
    from omni_flow.cli.errors import UserError
    from omni_flow.cli.target import load
    from omni_flow.control.findings import GraphError

    os.set_inheritable(options.socket, False)
    os.set_inheritable(options.lock, False)
    sock = socket.socket(fileno=options.socket)
    try:
        plan = load(options.target).graph.compile().plan
    except (UserError, GraphError) as error:
        sock.send(messages.encode(messages.Broken(str(error))))
        return 1
    return serve_plan(sock, options.lock, options.launcher, plan)


if __name__ == "__main__":
    raise SystemExit(main())
