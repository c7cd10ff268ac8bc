"""The run directory: where the sockets of a deployment lie, private to its user, gone with it.

A deployment holds a lock on its directory for as long as one of its own processes lives. Directories that nobody locks
are left-overs of a deployment all of whose processes were killed at once; the next start removes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile

from omni_flow.control.transport.directory import private_directory
from omni_flow.deploy.errors import RunDirInUse

_LOCK = "lock"
_MEMORY_LOCK = re.compile(r"memory\d*\.sock\.lock")
"""What each memory manager keeps beside its socket."""


class RunDir:
    """A directory of this deployment alone. `path` names it, `lock` is the descriptor that holds it."""

    def __init__(self, path: str | None = None) -> None:
        """`path`: use exactly this directory; otherwise a new one below the user's runtime directory.

        Raises: RunDirInUse, InsecureDirectory.
        """
        if path is not None:
            path = os.path.abspath(path)
            private_directory(path)
            lock = _lock(path)
            if lock is None:
                raise RunDirInUse(path)
            self.path, self.lock = path, lock
            return
        base = base_directory()
        private_directory(base)
        guard = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
            _sweep(base)
            self.path = os.path.join(base, secrets.token_hex(4))
            os.mkdir(self.path, 0o700)
            made = _lock(self.path)
            assert made is not None
            self.lock = made
        finally:
            os.close(guard)

    def remove(self) -> None:
        """Remove the directory with all in it, and give up the lock."""
        remove(self.path)
        os.close(self.lock)


def remove(path: str) -> None:
    """Remove the sockets and the locks in a run directory, and the directory unless a user keeps other files there."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(path):
            lock = entry.name == _LOCK or _MEMORY_LOCK.fullmatch(entry.name)
            with contextlib.suppress(FileNotFoundError):  # its owner ends now, too
                if lock or stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    os.unlink(entry.path)
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def base_directory() -> str:
    """Where run directories lie: below XDG_RUNTIME_DIR, else the directory of temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return os.path.join(runtime, "omni-flow")
    return os.path.join(tempfile.gettempdir(), f"omni-flow-{os.getuid()}")


def _lock(path: str) -> int | None:
    """A descriptor that locks the directory; None if another process has it.

    The lock is on a file of its own: transports lock the directory itself while they bind.
    """
    lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _sweep(base: str) -> None:
    """Remove directories that nobody locks. The caller holds the lock of `base`, under which they are made."""
    for entry in os.scandir(base):
        if not entry.is_dir(follow_symlinks=False):
            continue
        lock = _lock(entry.path)
        if lock is not None:
            remove(entry.path)
            os.close(lock)
