"""Nonsense on the wire never takes the server down."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_flow.data.errors import BadMessage, Disconnected, Refused, StaleEpoch
from omni_flow.data.link import UnixLink
from omni_flow.data.messages import Commit, Hello, Lookup, PoolName, Reserve
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.protocol import ERROR, Failure, Op, encode
from omni_flow.data.server_config import ServerConfig

from .conftest import Make, Manager, failure, hello, keys

OPS = sorted(value for name, value in vars(Op).items() if not name.startswith("_"))
TYPES = ("u1", "u2", "u4", "u8", "i8")


@pytest.fixture(scope="module")
def lasting() -> Iterator[Manager]:
    """One manager for all examples: it must survive them."""
    with tempfile.TemporaryDirectory(prefix="omni") as folder:
        pool = PoolSpec(name="kv", page_bytes=64, l1_pages=64, l2_pages=64)
        server = Manager(ServerConfig(path=f"{folder}/m.sock", pools=(pool,), temp_bytes=1 << 20, huge=False))
        yield server
        with server.client(role="viewer") as client:
            assert client.check() == []
            assert client.stats()["internal_errors"] == 0, server.log
        server.close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=300))
def test_random_datagrams_do_not_take_the_server_down(lasting: Manager, raw: bytes) -> None:
    link = UnixLink(lasting.path)
    link.sock.send(raw)
    with contextlib.suppress(BadMessage, Refused, StaleEpoch):
        hello(link)
    link.close()


BODIES = st.recursive(
    st.one_of(st.integers(-(2**63), 2**63), st.text(max_size=5), st.booleans(), st.just("kv"), st.none()),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=8,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*OPS, 0x6F, 0xFF]), BODIES, st.lists(st.integers(0, 5), max_size=4))
def test_well_formed_nonsense_is_answered_by_typed_errors(
    lasting: Manager, op: int, body: object, kinds: list[int]
) -> None:
    link = UnixLink(lasting.path)
    epoch = hello(link)
    columns = [np.zeros((3, 32), np.uint8) if k == 5 else np.arange(2 * k, dtype=TYPES[k]) for k in kinds]
    bare = encode(op, 0, 9, epoch, None, columns)
    head = 24 + 8 * len(columns)
    encoded = msgspec.msgpack.encode(body)
    whole = bare[:head] + encoded + (bytes(-len(encoded) & 7) if columns else b"") + bare[head:]
    lengths = len(encoded).to_bytes(4, "little") + len(whole).to_bytes(4, "little")
    link.sock.send(whole[:16] + lengths + whole[24:])
    with contextlib.suppress(Disconnected):
        link.send(encode(Op.PING, 0, 10, epoch))
        while (answer := link.receive(10)) is not None and answer.request != 10:
            for fd in answer.fds:
                os.close(fd)
            if answer.flags & ERROR:
                assert answer.body(Failure).code not in ("internal", "system")
        assert answer is not None
    link.close()


def test_oversized_half_and_foreign_messages_get_an_answer(manager: Make) -> None:
    server = manager()
    link = UnixLink(server.path)
    epoch = hello(link)
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    good = encode(Op.LOOKUP, 0, 5, epoch, Lookup(()), (keys(4),))
    link.sock.send(good + bytes(200_000 - len(good)))
    assert failure(link) == BadMessage.code
    link.sock.send(good[:60])
    assert failure(link) == BadMessage.code
    link.sock.send(b"\x02" + good[1:])
    assert failure(link) == BadMessage.code
    link.sock.send(encode(Op.RESERVE, 0, 6, epoch ^ 1, Reserve("kv", 1)))
    assert failure(link) == StaleEpoch.code
    link.sock.send(encode(Op.COMMIT, 0, 7, epoch, Commit("kv", 3), (np.zeros(3, np.uint64),)))
    assert failure(link) == BadMessage.code
    link.close()


def test_a_client_that_names_pages_differently_is_refused(manager: Make) -> None:
    link = UnixLink(manager().path)
    link.send(encode(Op.HELLO, 0, 3, 0, Hello("client", "old", vector=bytes(32))))
    assert failure(link) == Refused.code
    link.close()


def test_nothing_is_done_before_hello(manager: Make) -> None:
    link = UnixLink(manager().path)
    link.send(encode(Op.RESERVE, 0, 3, 0, Reserve("kv", 1)))
    assert failure(link) == Refused.code
    link.close()


def test_a_client_that_does_not_read_is_cut_off_and_hurts_nobody(manager: Make) -> None:
    server = manager()
    deaf = UnixLink(server.path)
    epoch = hello(deaf)
    request = encode(Op.PROBE, 0, 4, epoch, PoolName("kv"), (np.zeros((4096, 32), np.uint8),))
    deaf.sock.setblocking(False)
    with server.client() as client:
        before = client.stats()["sessions"]
        with contextlib.suppress(OSError):
            while client.stats()["sessions"] == before:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        deaf.sock.send(request)
        client.ping()
    deaf.close()


def test_columns_of_unlike_lengths_are_a_bad_message(lasting: Manager) -> None:
    with lasting.client() as client, pytest.raises(BadMessage):
        client.call(Op.T_SETTLE, None, (np.arange(4, dtype=np.uint32), np.arange(3, dtype=np.uint32)))


@pytest.mark.long
def test_a_fuzz_that_follows_coverage_finds_nothing() -> None:
    script = Path(__file__).parents[3] / "bench" / "fuzz_protocol.py"
    run = subprocess.run([sys.executable, script, "--seconds", "20"], stdout=subprocess.PIPE, timeout=120, check=False)
    found = json.loads(run.stdout)
    assert (run.returncode, found["findings"]) == (0, [])
    assert found["runs"] > 1000
