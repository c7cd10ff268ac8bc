"""Shared mappings of memory files at addresses where huge pages fit, and the advice that makes them huge.

Linux maps a huge page only where address and file offset agree modulo its size, and places shared mappings anywhere
unless asked. With the address right, `MADV_COLLAPSE` (Linux 6.1) gives a memory file huge pages whatever
`transparent_hugepage/shmem_enabled` says (except `deny`), with nothing set aside by the administrator; every other
mapping of the file at a right address has them too. Clearing a huge page at once is also about ten times faster than
faulting in 512 small ones.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final

import numpy as np

HUGE: Final = 2 << 20
POPULATE_READ: Final = 22
POPULATE_WRITE: Final = 23
COLLAPSE: Final = 25
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def map_shared(fd: int, size: int, write: bool, aligned: bool = False) -> memoryview:
    """Map the first `size` bytes of a memory file; unmapped with the last view.

    Python's mmap takes no address, so it reserves a larger range of nothing and the file is mapped into that; the
    reservation's end unmaps both. Where the system refuses, it may have emptied that range before it did, and another
    thread's memory may have come there since: such a reservation is never unmapped, not even at the process's exit.

    Args:
        aligned: the system finds a right address by itself, as it does for files of reserved huge pages.

    Raises:
        OSError: the system refuses.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    if aligned or size < HUGE:
        return memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, prot))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    around = memoryview(mmap.mmap(-1, size + HUGE, flags, prot))
    start = address_of(around)
    skip = -start % HUGE
    if _libc.mmap(start + skip, size, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _MAP_FAILED:
        code = ctypes.get_errno()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(around))  # a list would be emptied at the interpreter's end
        raise OSError(code, os.strerror(code))
    return around[skip : skip + size]


def address_of(view: memoryview) -> int:
    """Address of the first byte of a view, writable or not."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def advise(address: int, length: int, advice: int) -> int:
    """`madvise`, without holding the GIL. Returns 0 or the error number."""
    while _libc.madvise(address, length, advice):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0


def make_huge(address: int, length: int) -> bool:
    """Give writable, mapped memory of a memory file huge pages, contents kept; False where the system has none.

    Args:
        address, length: multiples of `HUGE`.
    """
    for at in range(address, address + length, HUGE):
        # Nothing collapses where nothing is mapped yet.
        if advise(at, mmap.PAGESIZE, POPULATE_WRITE):
            return False
    return advise(address, length, COLLAPSE) == 0
