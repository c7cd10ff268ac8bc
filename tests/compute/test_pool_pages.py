"""Pages that an engine leases of a memory manager's pool, where that has to make room first."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import pytest
from pool_rig import PoolRig

from omni_flow.compute.sglang.pagesource import PoolPages
from omni_flow.data.errors import DataError
from omni_flow.data.identity import PageHash
from omni_flow.data.posting_client import PostingClient
from omni_flow.data.protocol import MAX_BATCH

QUOTA, LEASE = 64, 8


def engine(rig: PoolRig) -> PostingClient:
    return PostingClient(rig.path, role="engine", quotas={"kv": QUOTA})


def test_a_lease_drops_cached_pages_that_nobody_writes_down_in_time_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = PoolRig(tmp_path)
    with contextlib.closing(rig), engine(rig) as client:
        source = PoolPages(client, "kv", QUOTA, patience=0.3)
        rig.client.reserve("kv", 200, least=1)  # all that the engine was not promised

        def fill() -> list[PageHash]:
            keys = [PageHash(os.urandom(32)) for _ in range(QUOTA)]
            source.unpin(source.seal(source.take(QUOTA, QUOTA), keys)())
            return keys

        with rig.mover_stopped(), caplog.at_level(logging.WARNING, "omni_flow.compute"):
            while not source.forced:
                assert not caplog.records
                kept = fill()
            assert [record.message for record in caplog.records] == [
                "cached pages were dropped: within 0.3 s nobody wrote them down a tier"
            ]
        monkeypatch.setattr(source, "_patience", 20.0)  # this machine may be slow
        fill()
        assert source.forced == 1
        assert rig.client.probe("kv", kept).all()  # wherever they are


def test_a_lease_waits_for_slots_that_a_dead_engine_had_and_drops_nothing_for_it(tmp_path: Path) -> None:
    rig = PoolRig(tmp_path, death_quarantine_s=3.0)
    with contextlib.closing(rig):
        with engine(rig) as dead:
            assert len(dead.reserve("kv", QUOTA).slots) == QUOTA
            rig.client.reserve("kv", 200, least=1)  # all that the engine was not promised
        with engine(rig) as client:
            source = PoolPages(client, "kv", QUOTA, patience=20.0)
            assert len(source.take(QUOTA, QUOTA)) == QUOTA
            assert source.forced == 0


def test_a_lease_takes_what_there_is_where_the_rest_of_its_quota_stays_closed(tmp_path: Path) -> None:
    rig = PoolRig(tmp_path, death_quarantine_s=3600.0)
    with contextlib.closing(rig):
        with engine(rig) as dead:
            dead.reserve("kv", QUOTA - LEASE)
            rig.client.reserve("kv", 200, least=1)  # all that the engine was not promised
        with engine(rig) as client:
            source = PoolPages(client, "kv", QUOTA, patience=0.1)
            assert LEASE <= len(source.take(QUOTA, LEASE)) < QUOTA
            assert source.forced == 0


def test_more_pages_than_one_message_names_are_leased_together_or_not_at_all(tmp_path: Path) -> None:
    most = MAX_BATCH + 500
    rig = PoolRig(tmp_path, l1_pages=most + 1000)
    with contextlib.closing(rig), PostingClient(rig.path, role="engine", quotas={"kv": most}) as client:
        source = PoolPages(client, "kv", most, patience=0.1)
        pages = source.take(most, most)
        assert len(set(pages)) == most
        source.give(pages)
        rig.client.reserve("kv", 2000, least=1)  # all that the engine was not promised
        with pytest.raises(DataError):
            source.take(most + 1, most + 1)
        client.ping()
        (mine,) = (row for row in client.inspect() if row["role"] == "engine")
        assert mine["held"].get("kv", [0, 0]) == [0, 0]
