"""Pages that an engine leases of a memory manager's pool, where that has to make room first."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from omni_flow.compute.sglang.pagesource import PoolPages
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import PageHash
from omni_flow.data.launch import start
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.posting_client import PostingClient
from omni_flow.data.server_config import ServerConfig

QUOTA, LEASE, OTHERS = 64, 8, 16


def test_a_lease_waits_for_a_mover_that_stands_still_once_and_then_takes_what_is_cached(tmp_path: Path) -> None:
    path = str(tmp_path / "m.sock")
    pool = PoolSpec(name="kv", page_bytes=4096, l1_pages=QUOTA + 2 * OTHERS, l2_pages=4 * QUOTA)
    manager = start(ServerConfig(path=path, pools=(pool,), movers=(("copy",),), huge=False))
    with MemoryManagerClient(path) as other, PostingClient(path, role="engine", quotas={"kv": QUOTA}) as client:
        source = PoolPages(client, "kv", QUOTA, patience=0.2)
        while not (movers := [int(row["pid"]) for row in other.inspect() if row["role"] == "mover"]):
            other.wait_end(0.02)
        os.kill(movers[0], signal.SIGSTOP)
        try:
            keys = [PageHash(os.urandom(32)) for _ in range(OTHERS)]
            other.commit("kv", other.reserve("kv", OTHERS).token, keys)
            mine = [PageHash(os.urandom(32)) for _ in range(QUOTA)]
            source.unpin(source.seal(source.take(QUOTA, QUOTA), mine)())
            before, taken = other.stats()["pool_waits/kv"], 0
            while other.stats()["pool_waits/kv"] == before:
                taken += len(source.take(LEASE, LEASE))
            while taken < QUOTA:
                taken += len(source.take(LEASE, LEASE))
            assert other.stats()["pool_waits/kv"] == before + 1
        finally:
            os.kill(movers[0], signal.SIGCONT)
    manager.terminate()
    assert manager.wait(20) == 0
