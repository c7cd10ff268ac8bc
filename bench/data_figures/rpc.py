"""`rpc_ratio_to_echo[_one_core]`: one-key probe over a bare SEQPACKET echo of 96 bytes, at the same pinning."""

from __future__ import annotations

import os

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.pool_spec import PoolSpec

from .tools import Bench, echo_server, median_s


def measure(bench: Bench) -> None:
    """Rounds of 300 probes and 300 echoes, interleaved."""
    pool = PoolSpec(name="kv", page_bytes=64, l1_pages=1 << 16)
    with bench.manager(pools=(pool,)) as (pid, path), echo_server() as (echo_pid, sock):
        client = MemoryManagerClient(path)
        key = np.frombuffer(os.urandom(32), np.uint8).reshape(1, 32)
        client.commit("kv", client.reserve("kv", 1).token, key)
        ping, buffer = bytes(96), bytearray(4096)

        def echo() -> None:
            sock.send(ping)
            sock.recv_into(buffer)

        for suffix, server, mine in bench.pinnings():
            with bench.pinned(server, mine, pid, echo_pid):
                for _ in range(bench.rounds(24)):
                    bare = median_s(echo, 300)
                    rpc = median_s(lambda: client.probe("kv", key), 300)
                    bench.add(f"rpc_ratio_to_echo{suffix}", rpc / bare)
                    bench.add(f"rpc_us{suffix}", rpc * 1e6)
                    bench.add(f"echo_us{suffix}", bare * 1e6)
        client.close()
