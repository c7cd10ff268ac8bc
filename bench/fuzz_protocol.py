"""Coverage-guided fuzz of the memory manager's messages: `python bench/fuzz_protocol.py --seconds N [--corpus DIR]`.

atheris (extra `dev`) mutates sequences of messages that a whole server handles in this process: KV pools, movers,
TempBuffers, transfer, weights. The seeds are valid conversations for every op. Whatever comes in must be answered by a
reply or a typed error: an internal error, an exception out of the server, or a violated invariant after the session
has ended is a finding, and the input that led to it is kept. Prints one JSON line; exit code 0 without findings.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

INNER = "--inner" in sys.argv
with atheris.instrument_imports(include=["omni_flow.data"]) if INNER else contextlib.nullcontext():
    import msgspec
    import numpy as np

    from omni_flow.data import messages as b
    from omni_flow.data.job_service import JobService
    from omni_flow.data.kv_service import KvService
    from omni_flow.data.launch import default_services
    from omni_flow.data.pool_spec import PoolSpec
    from omni_flow.data.protocol import Op, encode
    from omni_flow.data.server import Server
    from omni_flow.data.server_config import ServerConfig
    from omni_flow.data.transfer import messages as t
    from omni_flow.data.weights import messages as w
    from omni_flow.data.weights.names import Family, TensorSpec, WeightName

FOREIGN_EPOCH, FOREIGN_LENGTH = 1, 2
NO_PROCESS = 1 << 22
CHECK_EVERY = 32
Said = tuple[int, msgspec.Struct | None, tuple[np.ndarray, ...]]


class Ear:
    """The sending half of a connection that nobody listens to."""

    def __init__(self) -> None:
        self.shut_down = False

    def send(self, data: bytes, fds: Sequence[int]) -> None:
        return None

    def shut(self) -> None:
        self.shut_down = True


class Target:
    """A server, and what one input does to it."""

    def __init__(self, folder: str) -> None:
        pool = PoolSpec(name="kv", page_bytes=64, l1_pages=64, l2_pages=64, l3_pages=64)
        config = ServerConfig(
            path=f"{folder}/m.sock", pools=(pool,), temp_bytes=1 << 20, huge=False, weight_linger_s=0.0
        )
        self.server = Server(config, default_services)
        self.kv = next(service for service in self.server.services if isinstance(service, KvService))
        self.jobs = next(service for service in self.server.services if isinstance(service, JobService))
        self.inputs = 0

    def one(self, data: bytes) -> None:
        """A session that says these messages, each behind a byte of flags and its length, and ends."""
        server = self.server
        for pool in self.kv.pools.values():
            pool.numbers = itertools.count(1)  # tokens as in the seeds; nothing of the session before is left
        self.jobs._numbers = self.jobs._fetches._numbers = itertools.count(1)
        ear = Ear()
        session = server.open_session(ear, NO_PROCESS, os.getuid())
        at = 0
        while at + 3 <= len(data) and not ear.shut_down:
            flags, length = data[at], int.from_bytes(data[at + 1 : at + 3], "little")
            message = bytearray(data[at + 3 : at + 3 + length])
            at += 3 + length
            if len(message) >= 24:
                if not flags & FOREIGN_EPOCH:
                    message[8:16] = (server.epoch if session.ready else 0).to_bytes(8, "little")
                if not flags & FOREIGN_LENGTH:
                    message[20:24] = len(message).to_bytes(4, "little")
            server.receive(session, message, len(message), ())
        server.close_session(session)
        while server.reclaims:
            server._reclaim_slice()
        server._tick()
        self.inputs += 1
        if server.counters["internal_errors"]:
            raise AssertionError("an internal error, see the log above")
        if not self.inputs % CHECK_EVERY:
            faults = [fault for service in server.services for fault in service.check()]
            if faults:
                raise AssertionError(f"after {self.inputs} inputs: {faults}")


def seeds() -> list[bytes]:
    """Valid conversations, every op in one of them."""
    keys = np.arange(4 * 32, dtype=np.uint8).reshape(4, 32)
    u4, u8 = np.arange(4, dtype=np.uint32), np.arange(4, dtype=np.uint64)
    one = np.ones(4, np.uint8)
    family = Family("m", "r")
    specs = (TensorSpec(WeightName(family=family, path="a", dtype="u8"), (8,)),)
    client: Said = (Op.HELLO, b.Hello("client", "c", quotas={"kv": 8}), ())
    mover: Said = (Op.HELLO, b.Hello("mover", "m", kinds=("load", "pull")), ())
    ledger: Said = (Op.ARENA, b.ArenaRef("temp/ledger", True), ())
    disk: list[Said] = [
        (Op.HELLO, b.Hello("mover", "d", kinds=("store", "load", "copy", "push", "pull")), ()),
        (Op.TIER_STATE, b.TierState("kv", 4, True), ()),
        (Op.L3_CHANGE, b.L3Change("kv", "recovered"), (keys, u8, u8)),
    ]
    store: list[Said] = [(Op.RESERVE, b.Reserve("kv", 4), ()), (Op.COMMIT, b.Commit("kv", 1, True), (u4, keys))]
    none = t.DirAnswer(1, (), ())
    talks: list[list[Said]] = [
        [client, *store, (Op.LOOKUP, b.Lookup((b.Group("kv"),), prefetch=True), (keys,)), (Op.PING, None, ())],
        [client, *store, (Op.UNPIN, b.Unpin("kv", 2), (u4[:2],)), (Op.HINT, b.Hint("kv", 2, 9), (keys,))],
        [client, *store, (Op.DROP, b.PoolName("kv"), (keys,)), (Op.PROBE, b.PoolName("kv"), (keys,))],
        [
            client,
            *store,
            (Op.S_KEEP, b.SessionKeep("kv", "s", b"root", 16, 9.0), (keys,)),
            (Op.S_TIERS, b.SessionEnd("s"), ()),
            (Op.S_END, b.SessionEnd("s"), ()),
        ],
        [client, store[0], (Op.ABORT, b.Abort("kv", 1, 5), (u4[:3],)), (Op.GOODBYE, None, ())],
        [client, (Op.LOOKUP, b.Lookup((b.Group("kv", 2, 2), b.Group("kv")), False, 7), (keys, keys)), *store],
        [
            client,
            *store,
            (Op.JOB_ADD, b.JobAdd("push", "kv", 50, "x", 2), (keys,)),
            (Op.JOB_CANCEL, b.JobCancel(1), ()),
        ],
        [
            client,
            (Op.JOB_ADD, b.JobAdd("fetch", "kv", 50), (keys,)),
            (Op.JOB_ADD, b.JobAdd("pull", "kv", 9, "x"), (keys,)),
        ],
        [mover, (Op.TIER_STATE, b.TierState("kv", 4, True), ()), (Op.JOB_DONE, b.JobDone(1), (one, u8))],
        [
            mover,
            *((Op.L3_CHANGE, b.L3Change("kv", what), (keys, u8, u8)) for what in ("recovered", "moved", "dropped")),
        ],
        [
            client,
            ledger,
            (Op.T_LEASE, b.TempLease(4096, 4), ()),
            (Op.T_RETURN, None, (u4,)),
            (Op.T_FLUSH, None, ()),
            (Op.T_RENEW, None, ()),
        ],
        [client, ledger, (Op.T_RETRACT, b.TempRetract(1, 1), ()), (Op.T_SETTLE, None, (u4, u4))],
        [client, *((op, None, ()) for op in (Op.STATS, Op.OVERVIEW, Op.CHECK))],
        [client, (Op.INSPECT, b.SessionsAfter(0), ())],
        [client, *((Op.ARENA, b.ArenaRef(name, True), ()) for name in ("kv/l1", "temp", "temp/ledger", "weights/1"))],
        [(Op.ARENA, b.ArenaRef("kv/l2", False, 1, 1), ()), (Op.KEEPALIVE, b.ArenaRef("", False, 1, 1), ()), client],
        [client, (w.W_GET, w.WeightAsk(family, specs, None, 0), ()), (w.W_SEAL, w.WeightSeal(1, (bytes(16),)), ())],
        [client, (w.W_GET, w.WeightAsk(family, specs, 1, 5, 0), ()), (w.W_GIVE_UP, w.WeightGiveUp(1, "x"), ())],
        [client, (w.W_SUBSCRIBE, w.WeightFamily(family), ()), (w.W_SWITCH, w.WeightVersion(family, 1), ())],
        [client, (w.W_MANIFEST, w.WeightManifest(family, None, 0), ()), (w.W_RELEASE, w.WeightRelease((1,)), ())],
        [
            mover,
            (t.DIR_WATCH, None, ()),
            (t.DIR_ROWS, t.DirRowsAsk("kv", 0), ()),
            (t.DIR_REPORT, t.DirReport({"a": 1}), ()),
        ],
        [mover, (t.DIR_WATCH, None, ()), (t.DIR_ANSWER, t.DirAnswer(1, ("x",), ("x",)), (one,))],
        [mover, (t.DIR_WATCH, None, ()), (t.DIR_LOCATE, b.PoolName("kv"), (keys,)), (t.DIR_ANSWER, none, (one[:0],))],
        [*disk, (Op.JOB_ADD, b.JobAdd("fetch", "kv", 50, "", 2), (keys,)), (Op.JOB_DONE, b.JobDone(1), (one,))],
        [*disk, (Op.JOB_ADD, b.JobAdd("fetch", "kv", 50), (keys,)), (Op.JOB_DONE, b.JobDone(1, "x"), (one,))],
        [*disk, (Op.JOB_ADD, b.JobAdd("pull", "kv", 50, "x"), (keys ^ 1,)), (Op.JOB_DONE, b.JobDone(1), (one,))],
        [*disk, *store, (Op.JOB_ADD, b.JobAdd("push", "kv", 50, "x"), (keys,)), (Op.JOB_DONE, b.JobDone(1), (one,))],
        [*disk, (Op.LOOKUP, b.Lookup((b.Group("kv"),), tiers=7, prefetch=True), (keys,)), store[0]],
    ]
    found = []
    for talk in talks:
        whole = [encode(op, 0, at + 1, 0, body, columns) for at, (op, body, columns) in enumerate(talk)]
        found.append(b"".join(b"\0" + len(one).to_bytes(2, "little") + one for one in whole))
    return found


def inner(corpus: str, seconds: int) -> None:
    """Fuzz in this process; libFuzzer ends it."""
    logging.basicConfig(level=logging.ERROR)
    for at, seed in enumerate(seeds()):
        (Path(corpus) / f"seed-{at:02}").write_bytes(seed)
    with tempfile.TemporaryDirectory(prefix="omni-fuzz") as folder:
        target = Target(folder)
        arguments = [sys.argv[0], f"-max_total_time={seconds}", "-max_len=4096", f"-artifact_prefix={corpus}/finding-"]
        atheris.Setup([*arguments, corpus], target.one)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="how long")
    parser.add_argument("--corpus", help="keep the corpus and findings here and go on from it")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        inner(options.corpus, options.seconds)
    with tempfile.TemporaryDirectory(prefix="omni-corpus") as folder:
        corpus = Path(options.corpus or folder)
        corpus.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--inner", "--corpus", str(corpus), "--seconds", str(options.seconds)]
        run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        done = re.search(r"Done (\d+) runs in (\d+) second", run.stderr)
        edges = re.findall(r"cov: (\d+)", run.stderr)
        findings = [path.read_bytes().hex() for path in corpus.glob("finding-*")]
        print(
            json.dumps(
                {
                    "runs": int(done[1]) if done else 0,
                    "seconds": int(done[2]) if done else 0,
                    "edges": int(edges[-1]) if edges else 0,
                    "inputs": len(list(corpus.iterdir())),
                    "findings": findings,
                    "code": run.returncode,
                }
            )
        )
    if run.returncode or findings or not done:
        print(run.stderr[-4000:], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
