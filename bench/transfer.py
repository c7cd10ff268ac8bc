"""Transfer between two nodes on the loopback: the tcp driver against a raw socket, interleaved in one run.

`python bench/transfer.py [--json] [--rounds N]`. The raw socket is a process that sends 64 MiB from a mapped memory
file with sendall while this one receives them with recv_into into another: no checksum, no requests, one connection.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from omni_flow.data.transfer.base import ArenaId
from omni_flow.data.transfer.host import DriverHost

SIZE = 64 << 20
SMALL = 64 << 10
SOURCE, TARGET = ArenaId(1), ArenaId(2)


def memory_file() -> tuple[int, mmap.mmap]:
    """A pre-faulted memory file of SIZE bytes."""
    fd = os.memfd_create("bench-transfer")
    os.ftruncate(fd, SIZE)
    mapped = mmap.mmap(fd, SIZE)
    mapped[:] = os.urandom(1 << 20) * (SIZE >> 20)
    return fd, mapped


def serve_raw(fd: int, ports: Connection) -> None:
    """Send SIZE bytes of the file for each byte that comes in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    view = memoryview(mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ))
    with connection:
        while connection.recv(1):
            connection.sendall(view)


def raw_seconds(sock: socket.socket, view: memoryview) -> float:
    """One raw transfer of SIZE bytes."""
    begin = time.perf_counter()
    sock.sendall(b"x")
    done = 0
    while done < SIZE:
        done += sock.recv_into(view[done:])
    return time.perf_counter() - begin


def measure(rounds: int = 15) -> dict[str, float]:
    """Medians of interleaved rounds: GB/s of each way and `tcp_ratio_to_socket` (driver over raw socket)."""
    (source_fd, _), (target_fd, target) = memory_file(), memory_file()
    ours, theirs = multiprocessing.Pipe()
    raw = multiprocessing.get_context("fork").Process(target=serve_raw, args=(source_fd, theirs), daemon=True)
    raw.start()
    whole = np.array([[0, 0, SIZE]], np.uint64)
    offsets = np.random.default_rng(0).permutation(SIZE // SMALL).astype(np.uint64) * np.uint64(SMALL)
    pages = np.stack([np.sort(offsets), offsets, np.full_like(offsets, SMALL)], axis=1)
    view = memoryview(target)
    seconds: dict[str, list[float]] = {"socket": [], "tcp": [], "tcp_write": [], "tcp_64kib_pages": []}
    with (
        socket.create_connection(("127.0.0.1", ours.recv())) as sock,
        DriverHost("tcp") as source,
        DriverHost("tcp") as sink,
    ):
        source.register_arena(SOURCE, source_fd, SIZE, "both")
        sink.register_arena(TARGET, target_fd, SIZE)
        peer = source.endpoint()
        for number in range(rounds + 2):
            times = {"socket": raw_seconds(sock, view)}
            for name, verb, spans in (
                ("tcp", sink.read, whole),
                ("tcp_64kib_pages", sink.read, pages),
                ("tcp_write", sink.write, whole),
            ):
                begin = time.perf_counter()
                verb(peer, TARGET, SOURCE, spans)
                times[name] = time.perf_counter() - begin
            if number >= 2:
                for name, value in times.items():
                    seconds[name].append(value)
    view.release()
    raw.join()
    found: dict[str, float] = {}
    for name, values in seconds.items():
        found[f"{name}_gb_per_s"] = SIZE / statistics.median(values) / 1e9
        found[f"{name}_spread"] = (max(values) - min(values)) / statistics.median(values)
    socket_s = statistics.median(seconds["socket"])
    found["tcp_ratio_to_socket"] = socket_s / statistics.median(seconds["tcp"])
    found["tcp_write_ratio_to_socket"] = socket_s / statistics.median(seconds["tcp_write"])
    found["tcp_pages_ratio_to_socket"] = socket_s / statistics.median(seconds["tcp_64kib_pages"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    if arguments.json:
        json.dump(found, sys.stdout)
        print()
        return
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, 64 MiB, loopback")
    for name, value in found.items():
        print(f"{name:32} {value:8.3f}")


if __name__ == "__main__":
    main()
