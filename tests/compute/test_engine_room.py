"""Pages come back from L2 into an L1 that the engine has pinned nearly whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import engine_kit as kit
import numpy as np

from omni_flow.compute.checkpoint import read_config
from omni_flow.compute.kv_layout import kv_layout
from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.compute.sglang.pages import LOT
from omni_flow.compute.sglang.worker import namespace_of
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.messages import L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

PAGE, QUOTA, LENGTH = 4, 256, 1000
FOLDER = kit.GOLDENS / "deepseek_v2_lite"
STAGING = 21


def test_idle_pins_of_the_engine_make_room_for_a_long_prompt_from_l2(tmp_path: Path) -> None:
    path = str(tmp_path / "m.sock")
    page_bytes = kv_layout(read_config(FOLDER)).page_bytes(PAGE, "float32")
    pool = PoolSpec(
        name="kv", page_bytes=page_bytes, l1_pages=1 + QUOTA + LOT + STAGING, l2_pages=800, padding=1, staging=STAGING
    )
    manager = start(ServerConfig(path=path, pools=(pool,), movers=(("copy",),), huge=False))
    config = EngineConfig(
        model=str(FOLDER),
        page_size=PAGE,
        max_tokens=QUOTA * PAGE,
        manager=path,
        pool="kv",
        share_weights=False,
        awake=0.1,
    )
    engine = SGLangEngine(config)
    random = np.random.default_rng(1)
    pinned, wanted = ([int(token) for token in random.integers(3, 256, LENGTH)] for _ in range(2))
    keys = PageChain(namespace_of(config).root()).upto(wanted, LENGTH - 1, PAGE)

    async def run() -> None:
        async with engine:
            await kit.answer(engine, kit.greedy(pinned, 1))
            assert (await engine.stats())["idle"] >= LENGTH // PAGE - 1
            with MemoryManagerClient(path) as client:
                room = client.reserve("kv", len(keys), tier=L2, timeout=10)
                client.commit("kv", room.token, keys)
            again = await kit.answer(engine, kit.greedy(wanted, 1))
            assert again.end.hits == (0, len(keys) * PAGE, 0)
            counts = await engine.stats()
            assert counts["loading"] == counts["held"] == counts["locked"] == 0
            assert counts["available"] + counts["pinned"] == counts["quota"]

    try:
        asyncio.run(run())
    finally:
        manager.terminate()
        assert manager.wait(20) == 0
