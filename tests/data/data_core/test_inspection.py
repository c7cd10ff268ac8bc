"""What people are shown of a running memory manager: who holds what, of everything it keeps."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from typer.testing import CliRunner

from omni_flow.data.cli import memory_app
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.messages import L1, L2, JobAdd
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.protocol import Op, encode
from omni_flow.data.temp_client import TempClient
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.names import Family, TensorSpec, WeightName

from .conftest import Make, keys, store
from .movers_rig import DEEP, FakeDisk, fill

FAMILY = Family("demo/model", "r1")
SPECS = [TensorSpec(WeightName(family=FAMILY, path=path, dtype="u8"), (1000,)) for path in ("first", "second")]


def load(spec: TensorSpec, view: memoryview) -> None:
    np.frombuffer(view, np.uint8)[:] = len(spec.name.path)


def seen(path: str, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        CliRunner().invoke(memory_app, ["inspect", "-a", path, "--json", *options]).stdout
    )
    return found


def of(client: MemoryManagerClient, name: str) -> dict[str, Any]:
    return next(row for row in client.inspect() if row["name"] == name)


def test_temp_buffers_are_shown_by_size_and_by_who_holds_them(manager: Make) -> None:
    server = manager(temp_bytes=1 << 20)
    with server.client(name="reader") as other, server.client(name="viewer", role="viewer") as viewer:
        reader = TempClient(other)
        with server.client(name="producer") as client:
            temp = TempClient(client)
            refs = [temp.put(np.zeros(5000, np.uint8)) for _ in range(3)]
            held = [reader.adopt(ref) for ref in refs[:2]]
            mine = of(viewer, "producer")["temp"]
            assert mine["bytes"] == 8192 * mine["slots"] >= 3 * 8192
            assert of(viewer, "reader")["temp"] == {"slots": 0, "bytes": 0, "unused": 0, "shares": 2}
            (row,) = viewer.overview()["temp"]["slots"]
            assert (row["size"], row["published"], row["without_owner"]) == (8192, 3, 0)
            temp.settle(refs[2:])
        server.settle()
        left = viewer.overview()["temp"]["without_owner"]
        assert (left["slots"], left["bytes"], left["held_by"]) == (2, 2 * 8192, [[of(viewer, "reader")["session"], 2]])
        for share in held:
            share.release()


def test_weights_are_shown_by_version_and_by_who_refers_to_them(manager: Make) -> None:
    server = manager()
    with server.client(name="one") as one, server.client(name="two") as two:
        for client in (one, two):
            WeightClient(client).get(SPECS, load)
        WeightClient(two).get(SPECS[:1], load, version=1)
        rows = seen(server.path, "--tensors")
        found = [(row["version"], row["current"], row["tensors"], row["held_by"]) for row in rows["weights"]]
        assert sorted(found) == [(0, True, 2, 2), (1, False, 1, 1)]
        assert sorted((row["tensor"], row["version"], row["bytes"]) for row in rows["tensors"]) == [
            ("first", 0, 1000),
            ("first", 1, 1000),
            ("second", 0, 1000),
        ]
        assert of(one, "two")["weights"]["segments"] == 2
    with server.client() as client:
        (row,) = [row for row in client.overview()["weights"] if row["version"] == 0]
        assert (row["held_by"], row["idle"]) == (0, row["segments"])


def test_pages_kept_for_sessions_count_where_they_were_kept(manager: Make) -> None:
    with manager().client(name="engine") as client:
        names = keys(6)
        store(client, names)
        client.keep_session("kv", "talk", b"root", names, tokens=16, ttl=60)
        assert of(client, "engine")["kept"] == {"kv": [1, 6]}
        client.end_session("talk")
        assert "kept" not in of(client, "engine")


def test_jobs_under_way_are_shown_with_who_asked_and_who_executes(manager: Make) -> None:
    server = manager(pools=(DEEP,))
    disk = FakeDisk(server.path)
    with server.client(name="asks", timeout=30) as client, server.client(role="viewer") as viewer:
        names = keys(4)
        fill(client, names)
        disk.sick = "silent"
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(client.fetch, "kv", names, tier=L2, timeout=30)
            while not (found := viewer.overview())["jobs"]:
                assert not viewer.wait_end(0.01)
            (job,), (asked,) = found["jobs"], found["fetches"]
            assert (job["kind"], job["from"], job["to"], job["mover"]) == (
                "copy",
                "l1",
                "l2",
                of(viewer, "disk")["session"],
            )
            assert (asked["session"], asked["pages"], asked["arrived"]) == (of(viewer, "asks")["session"], 4, 0)
            assert of(viewer, "disk")["jobs"] == len(found["jobs"])
            disk.sick = ""
            assert answer.result().all()
        assert viewer.overview()["jobs"] == viewer.overview()["fetches"] == []
    disk.close()


def test_all_is_shown_whatever_clients_name_things(manager: Make) -> None:
    """Each part fits into its message: as many pools as there may be, of the longest names, and so are all others."""
    pools = tuple(PoolSpec(name=f"{i:02}" + "p" * 98, page_bytes=4096, l1_pages=8, l2_pages=8) for i in range(22))
    server = manager(pools=pools)
    clients = [server.client(name="\N{GRINNING FACE}" * 200) for _ in range(30)]
    mover = server.client(role="mover", kinds=("pull",))
    for client in clients:
        for pool in pools:
            client.keep_session(pool.name, f"{client.welcome.session}", b"root", keys(1), tokens=1, ttl=60)
        ask = JobAdd("pull", pools[0].name, 60_000, "\N{GRINNING FACE}" * 512, L1)
        for number in range(1, 3):
            client.link.send(encode(Op.JOB_ADD, 0, number, client.epoch, ask, (keys(1),)))
    family = Family("m" * 30_000, "r" * 30_000)
    for version in range(3):
        WeightClient(mover).get(
            [TensorSpec(WeightName(family=family, path="w", dtype="u8"), (1000,))], load, version=version
        )
    with server.client(role="viewer") as viewer:
        assert len(viewer.inspect()) == 32
        found = viewer.overview()
        assert (len(found["weights"]), len(found["fetches"])) == (3, 50)
        assert viewer.stats()["sessions"] == 32
        assert viewer.check() == []
    for client in (*clients, mover):
        client.close()


def test_more_sessions_than_a_message_takes_are_all_shown(manager: Make) -> None:
    server = manager()
    clients = [server.client(name=f"{number:0200}") for number in range(120)]
    assert [row["name"] for row in clients[0].inspect()] == [f"{number:0200}" for number in range(120)]
    for client in clients:
        client.close()


def test_what_is_shown_names_no_page(manager: Make) -> None:
    server = manager(temp_bytes=1 << 20)
    with server.client() as client:
        names = keys(3)
        store(client, names, pin=True)
        client.keep_session("kv", "talk", b"root", names, tokens=16, ttl=60)
        shown = CliRunner(env={"COLUMNS": "400"}).invoke(memory_app, ["inspect", "-a", server.path]).output
        shown += json.dumps(seen(server.path))
        assert "KV pages" in shown
        assert not any(name.tobytes().hex()[:16] in shown for name in names)
