"""Arenas: what is mapped where, and what becomes of their bytes when small pages become huge."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from omni_flow.data.arena import Arena
from omni_flow.data.errors import BadArgument
from omni_flow.data.mapping import HUGE, make_huge, map_shared

SIZE = 3 * HUGE + 5 * mmap.PAGESIZE


def memory_file(size: int = SIZE) -> int:
    fd = os.memfd_create("omni-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def mappings(name: str) -> int:
    """How many mappings of a memory file this process has."""
    return Path("/proc/self/maps").read_text().count(f"memfd:omni-{name} ")


@pytest.mark.parametrize("write", [True, False])
def test_a_large_arena_is_mapped_where_huge_pages_fit(write: bool) -> None:
    arena = Arena.attach("test", memory_file(), SIZE, write=write)
    assert arena.address % HUGE == 0
    assert arena.size == len(arena.array) == SIZE
    assert arena.array.flags.writeable is write
    arena.close()


def test_a_mapping_goes_with_its_last_view() -> None:
    fd = memory_file()
    view = map_shared(fd, SIZE, write=True)
    part = np.frombuffer(view, np.uint8)[HUGE : HUGE + 16]
    del view
    gc.collect()
    part[:] = 7
    assert mappings("test") == 1
    assert os.pread(fd, 16, HUGE) == b"\7" * 16
    del part
    gc.collect()
    assert mappings("test") == 0
    os.close(fd)


def test_bytes_stay_while_pages_become_huge_under_writers_and_readers() -> None:
    fd = memory_file(4 * HUGE)
    owner = Arena.attach("test", os.dup(fd), 4 * HUGE, write=True)
    reader = Arena.attach("test", owner.reader_fd(), 4 * HUGE, write=False)
    words = owner.array.view(np.uint64)
    words[::64] = np.arange(len(words) // 64)
    done = threading.Event()
    wrong = 0

    def write() -> None:
        nonlocal wrong
        count = 0
        while not done.is_set():
            count += 1
            words[1::64] = count
            wrong += int((reader.array.view(np.uint64)[1::64] != count).sum())

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(8):
        make_huge(owner.address, 4 * HUGE)
    done.set()
    writer.join()
    assert wrong == 0
    assert (reader.array.view(np.uint64)[::64] == np.arange(len(words) // 64)).all()
    os.close(fd)
    owner.close()
    reader.close()


def test_scattered_pages_come_back_in_the_order_asked_for() -> None:
    arena = Arena.create("test", SIZE)
    page_bytes = 3 * mmap.PAGESIZE
    slots = np.random.default_rng(1).permutation(arena.size // page_bytes).astype(np.uint32)
    rows = np.random.default_rng(2).integers(0, 256, (len(slots), page_bytes), np.uint8)
    arena.scatter(page_bytes, slots, rows)
    assert (arena.pages(page_bytes, len(slots))[slots] == rows).all()
    reader = Arena.attach("test", arena.reader_fd(), arena.size, write=False)
    out = np.zeros((5, page_bytes), np.uint8)
    reader.gather(page_bytes, slots[3:8], out)
    assert (out == rows[3:8]).all()
    out = np.zeros((5, 2 * page_bytes), np.uint8)[:, :page_bytes]
    reader.gather(page_bytes, slots[3:8], out)
    assert (out == rows[3:8]).all()
    reader.gather(page_bytes, slots[:0], out[:0])
    arena.close()
    reader.close()


@pytest.mark.parametrize("slots", [[0, 100], [-1, 0], [0, 1, 2]])
def test_pages_outside_an_arena_are_refused_before_anything_is_copied(slots: list[int]) -> None:
    arena = Arena.create("test", 100 * mmap.PAGESIZE, huge=False)
    rows = np.ones((2, mmap.PAGESIZE), np.uint8)
    with pytest.raises(BadArgument):
        arena.scatter(mmap.PAGESIZE, np.array(slots), rows)
    assert not arena.array.any()
    with pytest.raises(BadArgument):
        arena.gather(mmap.PAGESIZE, np.array(slots), rows)
    assert rows.all()
    arena.close()


@pytest.mark.parametrize("populate", ["now", "background", "lazy"])
@pytest.mark.parametrize("huge", [True, False])
def test_an_arena_is_zero_and_its_memory_is_there(huge: bool, populate: str) -> None:
    arena = Arena.create("test", SIZE, huge=huge, populate=populate)
    assert arena.populated.wait(30)
    assert arena.size >= SIZE
    if populate != "lazy" and arena.page_size == mmap.PAGESIZE:
        assert os.fstat(arena.fd).st_blocks * 512 == arena.size
    assert not arena.array.any()
    arena.close()


def test_an_arena_asked_to_be_huge_has_huge_pages_where_the_kernel_gives_them() -> None:
    probe = memory_file(HUGE)
    mapped = map_shared(probe, HUGE, write=True)
    given = make_huge(np.frombuffer(mapped, np.uint8).ctypes.data, HUGE)
    arena = Arena.create("huge-test", 4 * HUGE)
    reader = Arena.attach("huge-test", arena.reader_fd(), arena.size, write=False)
    reader.populate()
    smaps = Path("/proc/self/smaps").read_text().split("memfd:omni-huge-test ")[1:]
    huge = sum(int(part.split("ShmemPmdMapped:")[1].split()[0]) for part in smaps)
    assert arena.page_size == HUGE or (huge == 2 * 4 * HUGE >> 10) is given
    os.close(probe)
    arena.close()
    reader.close()


_REFUSED = """
import os, resource
from omni_flow.data.arena import Arena
from omni_flow.data.errors import OutOfMemory


def large_file():
    fd = os.memfd_create("large")
    os.ftruncate(fd, 4 << 30)
    return fd


resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
before = os.listdir("/proc/self/fd")
for make in (
    lambda: Arena.create("large", 4 << 30, populate="lazy"),
    lambda: Arena.attach("large", large_file(), 4 << 30, write=False),
):
    try:
        make()
    except OutOfMemory as error:
        assert "large" in str(error)
    else:
        raise SystemExit("mapped")
assert os.listdir("/proc/self/fd") == before
"""


def test_an_arena_that_is_not_to_be_had_leaves_no_descriptor() -> None:
    subprocess.run([sys.executable, "-c", _REFUSED], check=True, timeout=60)


_OVERLAID = """
import ctypes, gc, mmap, os, sys
from pathlib import Path

import numpy as np

from omni_flow.data.mapping import HUGE, map_shared

size = 64 * HUGE
size += HUGE * int(Path("/proc/meminfo").read_text().partition("HugePages_Free:")[2].split()[0])
fd = os.memfd_create("omni-test", os.MFD_CLOEXEC | os.MFD_HUGETLB)
os.ftruncate(fd, size)
try:
    map_shared(fd, size, write=True)
except OSError:  # before its traceback is gone, and with that all that the call had
    others = mmap.mmap(-1, 32 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(others))
gc.collect()
others[:6] = b"there\\0"
libc = ctypes.CDLL(None)
libc.on_exit(libc.dprintf, ctypes.c_void_p(np.frombuffer(others, np.uint8).ctypes.data))
sys.exit(1)  # the interpreter ends, and after that dprintf(1, what others have there)
"""


def test_a_refused_mapping_does_not_unmap_what_others_put_in_its_place_not_even_at_exit() -> None:
    """Linux empties the range of a mapping at a given address before it finds that it has no huge pages for it."""
    done = subprocess.run([sys.executable, "-c", _OVERLAID], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("there", "", 1)


def test_an_arena_whose_huge_pages_are_not_there_leaves_no_range_behind() -> None:
    def size() -> int:
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmSize:")[2].split()[0])

    before = size()
    arena = Arena.create("test", 64 << 30, huge=True, populate="lazy")
    assert size() - before < 2 * arena.size
    arena.close()
    del arena
    assert size() - before < 32 << 30
