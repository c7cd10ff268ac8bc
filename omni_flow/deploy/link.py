"""The launcher's end of a nursery: starts it, gives orders, hears of workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

from omni_flow.control.plan import Plan
from omni_flow.deploy import messages
from omni_flow.deploy.errors import LaunchError
from omni_flow.deploy.messages import Broken, Order, Ready, Stop, Word
from omni_flow.deploy.nursery import fork_nursery, names_of

T = TypeVar("T")


class NurseryLink:
    """A nursery process. Made by any thread (best by the main one); the rest happens on the loop of `attach`."""

    def __init__(self, plan: Plan, lock: int, target: str | None) -> None:
        """Start the process: forked from this one, or, with a `target`, a fresh interpreter that imports it.

        `lock` is the descriptor that holds the run directory. Raises LaunchError.
        """
        self._names = names_of(plan)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = ours
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            if target is None:
                _refuse_cuda()
                with warnings.catch_warnings():
                    # 3.12 warns of threads that hold locks at the fork; `start="spawn"` is the way around.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    self.pid = fork_nursery(plan, theirs, lock)
            else:
                self._popen = _spawn(theirs.fileno(), lock, target)
                self.pid = self._popen.pid
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._gone: asyncio.Future[None] | None = None

    def attach(self, on_word: Callable[[Word], None], on_gone: Callable[[str], None]) -> None:
        """Listen on the running loop. `on_gone` is told when the nursery has ended, whyever."""
        self._loop = asyncio.get_running_loop()
        self._on_word, self._on_gone = on_word, on_gone
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone = self._loop.create_future()
        self._loop.add_reader(self._sock.fileno(), self._read)
        self._loop.add_reader(self._pidfd, self._ended)

    async def ready(self) -> None:
        """Wait until the nursery has the graph. Raises LaunchError."""
        await self._ready

    def order(self, order: Order) -> None:
        """Give an order. A nursery that is gone is told through `on_gone`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.send(messages.encode(order))

    def _read(self) -> None:
        while True:
            try:
                packet = self._sock.recv(messages.PACKET, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._loop.remove_reader(self._sock.fileno())
                return
            word = messages.decode_word(packet)
            if isinstance(word, Ready):
                self._take_ready(word)
            elif isinstance(word, Broken):
                self._ready.set_exception(LaunchError({"": word.cause}))
            else:
                self._on_word(word)

    def _take_ready(self, word: Ready) -> None:
        if word.names == self._names:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(
                LaunchError({"": "the target holds another graph than the one launched; pass the target of this graph"})
            )

    def _ended(self) -> None:
        self._read()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._sock.close()
        cause = f"the nursery process was ended: {how_ended(self._status())}"
        assert self._gone is not None
        if not self._ready.done():
            self._ready.set_exception(LaunchError({"": cause}))
        self._gone.set_result(None)
        self._on_gone(cause)

    def _status(self) -> int:
        """The exit status of the nursery, which has ended."""
        if self._popen is not None:
            return self._popen.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # some code in this process waits for any child
            return 0

    async def stop(self, grace_s: float) -> None:
        """End the workers and the nursery: SIGTERM now, SIGKILL after `grace_s`. Returns when all are gone."""
        if self._gone is None:  # nobody has worked with it yet
            self.attach(lambda _word: None, lambda _cause: None)
            self._ready.add_done_callback(asyncio.Future.exception)  # nobody waits for it either
        assert self._gone is not None
        if not self._gone.done():
            self.order(Stop(grace_s))
            await asyncio.shield(self._gone)


def how_ended(status: int) -> str:
    """An exit status in words. `status` is minus the signal's number for a death by signal."""
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory? see dmesg)" if -status == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def _refuse_cuda() -> None:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        raise LaunchError(
            {
                "": "CUDA is in use in this process, and a forked child cannot use it; "
                "pass target='file.py:graph' so that fresh processes import the graph"
            }
        )


def _spawn(sock: int, lock: int, target: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "omni_flow.deploy.nursery"]
    command += ["--socket", str(sock), "--lock", str(lock), "--launcher", str(os.getpid()), "--target", target]
    return subprocess.Popen(command, pass_fds=(sock, lock), stdin=subprocess.DEVNULL, start_new_session=True)
