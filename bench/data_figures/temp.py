"""`handover_us[_one_core]`: from before `publish` in one process to after the first and last byte are read in the
other.

Ping-pong over a SEQPACKET pair, descriptors only, at 1 KiB, 1 MiB and 64 MiB; the figure is the slowest size's median.
What no hand-over can be faster than, at the same pinning and interleaved with it: `floor_wake_us[_one_core]`, from
before the write of a bare eventfd in one process to after the read that waited for it in the other, and
`floor_message_us[_one_core]`, the same for a message of a descriptor's length over such a pair.
"""

from __future__ import annotations

import functools
import mmap
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.temp_client import TempClient, decode_ref, encode_ref

from .tools import Bench

SIZES = (1 << 10, 1 << 20, 64 << 20)
STAMP = struct.Struct("<Q")
DESCRIPTOR = 96
FLOOR_ROUNDS = 600


def _side(path: str, sock: socket.socket, first: bool, size: int, rounds: int) -> list[int]:
    """One player; returns the one-way times (ns) of what it received."""
    spent: list[int] = []
    buffer = bytearray(512)
    with MemoryManagerClient(path) as client:
        temp = TempClient(client, populate=True)
        for turn in range(rounds * 2):
            if (turn % 2 == 0) == first:
                slot = temp.alloc(size)
                view = slot.view()
                view[0] = view[size - 1] = turn & 0xFF
                began = time.perf_counter_ns()
                ref = temp.publish(slot, "uint8", (size,))
                sock.send(STAMP.pack(began) + encode_ref(ref))
            else:
                length = sock.recv_into(buffer)
                share = temp.adopt(decode_ref(memoryview(buffer)[8:length]))
                view = share.view()
                ok = view[0] == view[size - 1] == turn & 0xFF
                spent.append(time.perf_counter_ns() - STAMP.unpack_from(buffer)[0])
                assert ok
                del view
                share.release()
    return spent[len(spent) // 10 :]


def _message_side(sock: socket.socket, first: bool) -> list[int]:
    """One player of `floor_message_us`."""
    spent: list[int] = []
    buffer, descriptor = bytearray(512), bytes(DESCRIPTOR)
    for turn in range(FLOOR_ROUNDS * 2):
        if (turn % 2 == 0) == first:
            sock.send(STAMP.pack(time.perf_counter_ns()) + descriptor)
        else:
            sock.recv_into(buffer)
            spent.append(time.perf_counter_ns() - STAMP.unpack_from(buffer)[0])
    return spent[len(spent) // 10 :]


def _wake_side(events: tuple[int, int], stamp: mmap.mmap, first: bool) -> list[int]:
    """One player of `floor_wake_us`; the stamps go by memory."""
    spent: list[int] = []
    for turn in range(FLOOR_ROUNDS * 2):
        if (turn % 2 == 0) == first:
            STAMP.pack_into(stamp, 0, time.perf_counter_ns())
            os.eventfd_write(events[first], 1)
        else:
            os.eventfd_read(events[not first])
            spent.append(time.perf_counter_ns() - STAMP.unpack_from(stamp)[0])
    return spent[len(spent) // 10 :]


def _play(bench: Bench, there: int, here: int, player: Callable[[bool], list[int]], *pids: int) -> float:
    """Median (µs) of what this process, pinned to `here`, receives from one forked and pinned to `there`, as are
    `pids`."""
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {there})
        player(False)
        os._exit(0)
    with bench.pinned(there, here, *pids):
        spent = player(True)
    os.waitpid(child, 0)
    return statistics.median(spent) / 1000


def measure(bench: Bench) -> None:
    """Both players in processes of their own; the server pinned with the second player."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    events = os.eventfd(0), os.eventfd(0)
    with here, there, mmap.mmap(-1, STAMP.size) as stamp, bench.manager(temp_bytes=1 << 30) as (pid, path):
        for suffix, server, mine in bench.pinnings():
            for _ in range(bench.rounds(8)):
                wake = _play(bench, server, mine, functools.partial(_wake_side, events, stamp))
                bench.add(f"floor_wake_us{suffix}", wake)
                message = _play(bench, server, mine, lambda first: _message_side(here if first else there, first))
                bench.add(f"floor_message_us{suffix}", message)
                worst = 0.0
                for size in SIZES:

                    def player(first: bool, size: int = size) -> list[int]:
                        rounds = 600 if size < 64 << 20 else 60
                        return _side(path, here if first else there, first, size, rounds)

                    median = _play(bench, server, mine, player, pid)
                    bench.add(f"handover_{size >> 10}KiB_us{suffix}", median)
                    worst = max(worst, median)
                bench.add(f"handover_us{suffix}", worst)
    for event in events:
        os.close(event)
