"""What a forked child must do before it is a process of its own. Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Callable, Collection
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_STANDARD = (0, 1, 2)


def forked(keep: Collection[int], main: Callable[[], int]) -> int:
    """Fork; the child runs `main` and ends with its result. Returns the child's pid.

    The child has default signal handlers, a session of its own, no descriptors but the standard ones (input from
    nowhere) and `keep`, and no running event loop. It runs no finaliser of what it inherited.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(keep, main)
    return pid


def _be_child(keep: Collection[int], main: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        gc.freeze()
        asyncio._set_running_loop(None)
        _reset_signals()
        with contextlib.suppress(PermissionError):  # it leads a group already
            os.setsid()
        _shed_descriptors(keep)
        _standard_streams()
        status = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE) or signal.getsignal(signum) is None:
            continue
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _shed_descriptors(keep: Collection[int]) -> None:
    """Put /dev/null in the place of every inherited descriptor.

    Not closed: inherited objects think that they own the numbers, and their finalisers would close what is opened
    under the same number later.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor in _STANDARD or descriptor in keep or descriptor == nowhere:
            continue
        try:
            fcntl.fcntl(descriptor, fcntl.F_GETFD)
        except OSError:  # it was the listing's own
            continue
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _standard_streams() -> None:
    """Notebooks and test runners put other objects there, which write to descriptors that are gone."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends; for children of one-threaded parents."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def end_group(pid: int) -> None:
    """Kill what a dead but unreaped child has left in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
