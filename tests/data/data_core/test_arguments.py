"""What callers pass that can't be meant is refused by the name of the argument, and costs nothing but the call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import BadArgument, StaleDescriptor
from omni_flow.data.messages import Group
from omni_flow.data.temp_aio import AsyncTempClient
from omni_flow.data.temp_client import TempClient
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.names import Family, TensorSpec, WeightName
from omni_flow.refs import TensorRef

from .conftest import Make, keys

ONE = keys(1)
MANY = keys(4097)
FAMILY = Family("demo/model", "r1")
SPEC = TensorSpec(WeightName(family=FAMILY, path="one", dtype="u8"), (8,))
Client = Any
"""Its methods are called with what their types forbid."""

KV_CALLS: list[tuple[str, Callable[[Client], Any]]] = [
    ("pool", lambda c: c.reserve(7, 1)),
    ("pool", lambda c: c.lookup("", ONE)),
    ("pool", lambda c: c.probe("k" * 600, ONE)),
    ("pool", lambda c: c.drop("\ud800", ONE)),
    ("count", lambda c: c.reserve("kv", -1)),
    ("count", lambda c: c.reserve("kv", 1.5)),
    ("count", lambda c: c.reserve("kv", True)),
    ("count", lambda c: c.reserve("kv", 1 << 70)),
    ("least", lambda c: c.reserve("kv", 4, least=-1)),
    ("timeout", lambda c: c.reserve("kv", 1, timeout=math.nan)),
    ("timeout", lambda c: c.reserve("kv", 1, timeout=-1.0)),
    ("timeout", lambda c: c.reserve("kv", 1, timeout="1")),
    ("timeout", lambda c: c.fetch("kv", ONE, timeout=math.inf)),
    ("tier", lambda c: c.reserve("kv", 1, tier="l1")),
    ("tier", lambda c: c.fetch("kv", ONE, tier=-1)),
    ("tiers", lambda c: c.lookup("kv", ONE, tiers=-3)),
    ("pin", lambda c: c.lookup("kv", ONE, pin="no")),
    ("token", lambda c: c.commit("kv", -1, ONE)),
    ("token", lambda c: c.commit("kv", None, ONE)),
    ("token", lambda c: c.abort("kv", 1 << 64)),
    ("lease", lambda c: c.unpin("kv", "lease")),
    ("fence_ms", lambda c: c.abort("kv", 1, fence_ms=-5)),
    ("positions", lambda c: c.unpin("kv", 1, positions=[-1])),
    ("positions", lambda c: c.unpin("kv", 1, positions=[0.5])),
    ("positions", lambda c: c.abort("kv", 1, positions=[1 << 40])),
    ("positions", lambda c: c.abort("kv", 1, positions=[[1], [2]])),
    ("positions", lambda c: c.abort("kv", 1, positions=[[1], [2, 3]])),
    ("keys", lambda c: c.probe("kv", 7)),
    ("keys", lambda c: c.probe("kv", ["a" * 32])),
    ("keys", lambda c: c.probe("kv", [b"short"])),
    ("keys", lambda c: c.probe("kv", np.zeros((1, 16), np.uint8))),
    ("keys", lambda c: c.probe("kv", np.zeros((1, 32)))),
    ("keys", lambda c: c.probe("kv", MANY)),
    ("keys", lambda c: c.fetch("kv", MANY)),
    ("peer", lambda c: c.pull("kv", ONE, 7)),
]
BLOCKING_CALLS: list[tuple[str, Callable[[Client], Any]]] = [
    ("priority", lambda c: c.hint("kv", ONE, 9, 1)),
    ("ttl", lambda c: c.hint("kv", ONE, 1, -1)),
    ("ttl", lambda c: c.keep_session("kv", "s", b"", ONE, tokens=1, ttl=math.nan)),
    ("tokens", lambda c: c.keep_session("kv", "s", b"", ONE, tokens=0, ttl=1)),
    ("chain", lambda c: c.keep_session("kv", "s", "root", ONE, tokens=1, ttl=1)),
    ("session", lambda c: c.keep_session("kv", 5, b"", ONE, tokens=1, ttl=1)),
    ("session", lambda c: c.end_session("")),
    ("session", lambda c: c.session_tiers(b"s")),
    ("window", lambda c: c.lookup_groups([(Group("kv", -1), ONE)])),
    ("stride", lambda c: c.lookup_groups([(Group("kv", 0, 0), ONE)])),
    ("name", lambda c: c.arena(7)),
    ("write", lambda c: c.arena("kv/l1", write="yes")),
    ("timeout", lambda c: c.wait_end(math.nan)),
]
TEMP_CALLS: list[tuple[str, Callable[[Client], Any]]] = [
    ("nbytes", lambda t: t.alloc(0)),
    ("nbytes", lambda t: t.alloc(-4096)),
    ("nbytes", lambda t: t.alloc(4096.0)),
    ("nbytes", lambda t: t.alloc("4096")),
    ("nbytes", lambda t: t.alloc(1 << 70)),
    ("timeout", lambda t: t.alloc(4096, timeout=math.nan)),
    ("timeout", lambda t: t.alloc(4096, timeout=-1)),
    ("consumers", lambda t: t.put(np.zeros(4), consumers=0)),
    ("consumers", lambda t: t.put(np.zeros(4), consumers=1.5)),
    ("consumers", lambda t: t.put(np.zeros(4), consumers="all")),
]
OPTIONS: list[dict[str, Any]] = [
    {"name": 7},
    {"name": "n" * 201},
    {"role": None},
    {"read_only": "no"},
    {"quotas": {"kv": -1}},
    {"quotas": {7: 1}},
    {"kinds": (1,)},
    {"timeout": math.nan},
    {"timeout": -1.0},
]


def test_calls_of_a_blocking_client(manager: Make) -> None:
    with manager().client() as client:
        for name, call in KV_CALLS + BLOCKING_CALLS:
            with pytest.raises(BadArgument, match=name):
                call(client)
        room = client.reserve("kv", np.int64(2), timeout=np.float32(0.5))
        client.commit("kv", room.token, keys(2), positions=np.arange(2), pin=np.bool_(False))
        assert client.stats()["bad_messages"] == 0


def test_calls_of_an_asynchronous_client(manager: Make) -> None:
    server = manager(temp_bytes=1 << 20)

    async def main() -> None:
        async with await AsyncMemoryManagerClient.connect(server.path) as client:
            for name, call in KV_CALLS:
                with pytest.raises(BadArgument, match=name):
                    await call(client)
            temp = AsyncTempClient(client)
            for name, call in TEMP_CALLS:
                with pytest.raises(BadArgument, match=name):
                    await call(temp)
            assert (await client.stats())["bad_messages"] == 0

    asyncio.run(main())


def test_calls_of_a_client_of_temp_buffers(manager: Make) -> None:
    with manager(temp_bytes=1 << 20).client() as client:
        temp = TempClient(client)
        for name, call in TEMP_CALLS:
            with pytest.raises(BadArgument, match=name):
                call(temp)
        buffer: Any = temp.alloc(np.int64(4096))
        odd: Client = temp
        for name, dtype, shape in (
            ("dtype", 7, (1,)),
            ("shape", "u1", [1]),
            ("shape", "u1", (-1,)),
            ("shape", "u1", 4),
        ):
            with pytest.raises(BadArgument, match=name):
                odd.publish(buffer, dtype, shape)
        ref = temp.publish(buffer, "uint8", (4096,))
        for shares in (0, -1, 1.0, "1", 1 << 40):
            with pytest.raises(BadArgument, match="shares"):
                odd.adopt(ref, shares)
            with pytest.raises(BadArgument, match="shares"):
                odd.retract(ref, shares)
        temp.adopt(ref).release()
        temp.flush()
        assert client.stats()["bad_messages"] == 0


@pytest.mark.parametrize("change", [{"offset": -4096}, {"generation": -1}, {"generation": 1 << 40}], ids=str)
def test_a_descriptor_of_what_cannot_be_is_stale_and_takes_no_share(manager: Make, change: dict[str, int]) -> None:
    with manager(temp_bytes=1 << 20).client() as client:
        temp = TempClient(client)
        ref = temp.put(np.zeros(8))
        fields = {name: getattr(ref, name) for name in ref.__struct_fields__} | change
        with pytest.raises(StaleDescriptor):
            temp.adopt(TensorRef(**fields))
        temp.adopt(ref).release()


def test_calls_of_a_client_of_weights(manager: Make) -> None:
    def load(_spec: TensorSpec, view: memoryview) -> None:
        view[:] = bytes(len(view))

    with manager().client() as client:
        weights: Client = WeightClient(client)
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("specs", lambda: weights.get([], load)),
            ("specs", lambda: weights.get(["one"], load)),
            ("loader", lambda: weights.get(SPEC, None)),
            ("version", lambda: weights.get(SPEC, load, version=-1)),
            ("version", lambda: weights.switch(FAMILY, "1")),
            ("version", lambda: weights.manifest(FAMILY, 1.0)),
            ("device", lambda: weights.get(SPEC, load, device=-2)),
            ("timeout_s", lambda: weights.get(SPEC, load, timeout_s=math.nan)),
            ("family", lambda: weights.manifest("demo/model")),
            ("family", lambda: weights.subscribe(None, print)),
            ("on_switch", lambda: weights.subscribe(FAMILY, None)),
        ]
        for name, call in calls:
            with pytest.raises(BadArgument, match=name):
                call()
        assert weights.get(SPEC, load).verify() == []
        assert client.stats()["bad_messages"] == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_a_client(manager: Make, options: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=next(iter(options))):
        MemoryManagerClient(manager().path, **options)
