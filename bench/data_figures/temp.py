"""`handover_us[_one_core]`: from before `publish` in one process to after the first and last byte are read in the
other.

Ping-pong over a SEQPACKET pair, descriptors only, at 1 KiB, 1 MiB and 64 MiB; the figure is the slowest size's median.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.temp_client import TempClient, decode_ref, encode_ref

from .tools import Bench

SIZES = (1 << 10, 1 << 20, 64 << 20)
STAMP = struct.Struct("<Q")


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


def measure(bench: Bench) -> None:
    """Both players in processes of their own; the server pinned with the second player."""
    with bench.manager(temp_bytes=1 << 30) as (pid, path):
        for suffix, server, mine in bench.pinnings():
            for _ in range(bench.rounds(8)):
                worst = 0.0
                for size in SIZES:
                    rounds = 600 if size < 64 << 20 else 60
                    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    child = os.fork()
                    if child == 0:
                        os.sched_setaffinity(0, {server})
                        _side(path, there, False, size, rounds)
                        os._exit(0)
                    with bench.pinned(server, mine, pid):
                        spent = sorted(_side(path, here, True, size, rounds))
                    os.waitpid(child, 0)
                    here.close()
                    there.close()
                    median = spent[len(spent) // 2] / 1000
                    bench.add(f"handover_{size >> 10}KiB_us{suffix}", median)
                    worst = max(worst, median)
                bench.add(f"handover_us{suffix}", worst)
