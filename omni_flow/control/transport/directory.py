"""Where socket files live: a directory of mode 0700, and names that dead processes do not keep."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from omni_flow.control.transport.errors import AddressError, AddressInUse, AddressTooLong, InsecureDirectory

PATH_BYTES = 107
"""Most bytes of a socket path: 108 in the kernel's sockaddr_un, one for the terminating zero."""


def socket_path(url: str, scheme: str) -> str:
    """The path in `scheme://path`.

    Raises: AddressError if it is no absolute path under that scheme, AddressTooLong.
    """
    prefix = f"{scheme}://"
    if not url.startswith(prefix + "/") or url.endswith("/") or "\0" in url:
        raise AddressError(url, f"write {prefix}/absolute/path.sock")
    path = url[len(prefix) :]
    size = len(os.fsencode(path))
    if size > PATH_BYTES:
        raise AddressTooLong(url, size, PATH_BYTES)
    return path


def private_directory(directory: str) -> None:
    """Create `directory` with mode 0700, or check that it is a directory of this user which nobody else may enter.

    Raises: InsecureDirectory.
    """
    parent = os.path.dirname(directory)
    if parent:
        os.makedirs(parent, exist_ok=True)
    with suppress(FileExistsError):  # one that exists is checked like a fresh one
        os.mkdir(directory, 0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise InsecureDirectory(directory, "is no directory (or a symbolic link)", "name a directory of your own")
    if found.st_uid != os.geteuid():
        raise InsecureDirectory(
            directory, f"belongs to uid {found.st_uid}, not {os.geteuid()}", "name a directory of your own"
        )
    if found.st_mode & 0o077:
        raise InsecureDirectory(
            directory, f"has mode {stat.S_IMODE(found.st_mode):04o}, others may enter", f"chmod 700 {directory}"
        )


@contextmanager
def claimed(url: str, path: str, kind: socket.SocketKind) -> Iterator[None]:
    """Hold the lock of the socket directory while a socket is bound to `path`.

    A socket file that nobody listens on is removed first. The lock (on the directory itself, so it leaves no file) is
    held for a few system calls; without it two processes could both find a stale file and one remove the other's.

    Raises: AddressInUse if somebody listens, AddressError if the file is no socket.
    """
    with _locked(os.path.dirname(path)):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISSOCK(found.st_mode):
                raise AddressError(url, "a file that is no socket lies there; remove it or choose another name")
            if _listened_on(path, kind):
                raise AddressInUse(url)
            os.unlink(path)
        yield


class SocketFile:
    """The file of a socket just bound, to be removed when it closes."""

    def __init__(self, path: str) -> None:
        """To be called inside `claimed`."""
        self._path = path
        self._inode = _inode(path)

    def unlink(self) -> None:
        """Remove the file, unless it is gone or another process has taken the name since."""
        with suppress(FileNotFoundError), _locked(os.path.dirname(self._path)):
            if _inode(self._path) == self._inode:
                os.unlink(self._path)


def _inode(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold an exclusive lock on the directory itself."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _listened_on(path: str, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT)
