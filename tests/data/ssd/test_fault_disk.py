"""A disk that takes nothing more under a running node, and whose pages are on it."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from ssd_node import fill, names, node, right, when_on

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import Namespace, ObjectRange, object_key, page_hashes
from omni_flow.data.messages import L3


@pytest.mark.parametrize(("limit", "value"), [(resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)])
def test_a_disk_that_takes_no_more_stops_nobody_and_is_used_again_when_it_does(
    limit: int, value: int, folder: Path, tmp_path: Path
) -> None:
    """No byte can be written, or no file be opened, in the process that keeps L3."""
    with node(folder, tmp_path) as path, MemoryManagerClient(path) as client:
        when_on(client)
        before = names(150, 1)
        fill(client, before)
        mover = next(row["pid"] for row in client.inspect() if row["name"] == "ssd mover")
        soft, hard = resource.prlimit(mover, limit)
        resource.prlimit(mover, limit, (value, hard))
        during = names(900, 2)
        fill(client, during)
        stats = client.stats()
        assert stats["job_l3_off"] + stats["pool_job_pages_failed/kv"] > 0
        right(client, before)
        right(client, during[-60:])
        assert client.check() == []
        resource.prlimit(mover, limit, (soft, hard))
        when_on(client)
        after = names(150, 3)
        while not (client.probe("kv", after) & L3).any() or right(client, after[-16:]) < 16:
            fill(client, after)  # for a second after the last failure pages are dropped instead
        assert client.stats()["internal_errors"] == 0


def keys_of(salt: bytes) -> np.ndarray:
    """Keys of 150 pages of the same tokens under a tenant's salt."""
    space = Namespace(
        model="m",
        revision="r",
        weight_version=0,
        dtype="bfloat16",
        page_size=4,
        attention_layout="mla",
        tenant_salt=salt,
    )
    hashes = page_hashes(space.root(), np.arange(600, dtype=np.uint32), 4)
    raw = b"".join(object_key(page, ObjectRange(0, 4)) for page in hashes)
    return np.frombuffer(raw, np.uint8).reshape(-1, 32)


def test_equal_prompts_of_two_tenants_never_meet_not_even_on_disk_after_a_restart(folder: Path, tmp_path: Path) -> None:
    one, other = keys_of(b"tenant one"), keys_of(b"tenant two")
    with node(folder, tmp_path, stop=signal.SIGTERM) as path, MemoryManagerClient(path) as client:
        when_on(client)
        fill(client, one)
        below = np.flatnonzero(client.probe("kv", one) & L3)
        assert len(below) > 50
        assert not client.probe("kv", other).any()
    with node(folder, tmp_path) as path, MemoryManagerClient(path) as client:
        when_on(client)
        assert right(client, one[below[:20]]) == 20
        assert not client.probe("kv", other).any()
        assert not client.fetch("kv", other[:64], timeout=20).any()
        assert client.lookup("kv", other).pages == 0
