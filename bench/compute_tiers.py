"""What it costs an engine's host that a prompt lies in L2: `python bench/compute_tiers.py [--json] [--rounds N]`.

An engine of a tiny DeepSeek-V2 on a CPU, kept awake as on a GPU, over a memory manager with L1 and L2. Prompts of
32,705 tokens, 511 pages and one token; the pages are small (36 KB), so what is measured is the work per page, not the
bytes. They are written to L2 by the bench, with no KV in them: nobody looks at the tokens. The engine's quota (2,048
pages) is full of idle pages from the fifth round on, which is when the figures begin.

ttft_l2_ms, ttft_l1_ms   first token of a prompt found in L2, and of the same prompt again
added_ms                 their difference without the forward (`launched`), which is the same and most of the time
fetch_ms                 the pages of another prompt to L1, asked of the manager by the bench, in turn with these
l2.STEP_ms               what each step of the timeline took (`omni_flow/compute/sglang/timeline.py`)
cached_share             of the prompt's pages that were found; below 1 the rest was computed again

With --tight L1 is no larger than the quota needs, so the engine's own idle pages are in the way of a fetch. Figures are
medians of the rounds; the spread is printed beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

PAGE, PAGES, QUOTA, WARM = 64, 511, 2048, 5


class Rig:
    """An engine, and a client of its memory manager."""

    def __init__(self, engine: Any, client: Any, root: Any) -> None:
        self.engine, self.client, self._root = engine, client, root
        self._random = random.Random(1)

    def prompt(self) -> tuple[list[int], list[Any]]:
        """A fresh prompt whose pages lie in L2, and their keys."""
        from omni_flow.compute.prefix import PageChain
        from omni_flow.data.messages import L2

        ids = [self._random.randrange(3, 250) for _ in range(PAGES * PAGE + 1)]
        keys = PageChain(self._root).upto(ids, PAGES * PAGE, PAGE)
        for at in range(0, PAGES, 64):
            part = keys[at : at + 64]
            room = self.client.reserve("kv", len(part), tier=L2, timeout=20.0)
            self.client.commit("kv", room.token, part)
        return ids, keys

    async def first(self, ids: list[int]) -> tuple[float, Any]:
        """Milliseconds to the first token, and the end event."""
        from omni_flow.compute.engine import EndEvent, Request, Tokens
        from omni_flow.compute.sampling import Sampling

        sampling = Sampling(max_tokens=1, ignore_eos=True)
        end: Any = None
        async for event in self.engine.generate(Request(spans=[Tokens(ids)], sampling=sampling, timeline=True)):
            if isinstance(event, EndEvent):
                end = event
        times = dict(end.timeline)
        return (times["first_token"] - times["asked"]) / 1e6, end

    async def round(self) -> dict[str, float]:
        """All figures once."""
        from omni_flow.compute.sglang.timeline import durations

        _, keys = self.prompt()
        began = time.perf_counter()
        self.client.fetch("kv", keys)
        figures = {"fetch_ms": (time.perf_counter() - began) * 1e3}
        ids, _ = self.prompt()
        await self.first(ids[:40])  # the engine is awake, as under load
        figures["ttft_l2_ms"], end = await self.first(ids)
        figures["cached_share"] = end.cached_tokens / (PAGES * PAGE)
        figures["ttft_l1_ms"], again = await self.first(ids)
        steps, l1 = durations(end.timeline), durations(again.timeline)
        forwards = steps["launched"] - l1["launched"]
        figures["added_ms"] = figures["ttft_l2_ms"] - figures["ttft_l1_ms"] - forwards
        return figures | {f"l2.{step}_ms": took for step, took in steps.items()}


async def measure(rounds: int, folder: Path, tight: bool) -> dict[str, list[float]]:
    """Samples of all figures."""
    from omni_flow.compute.kv_layout import kv_layout
    from omni_flow.compute.sglang.config import EngineConfig
    from omni_flow.compute.sglang.kernel import SGLangEngine
    from omni_flow.compute.sglang.worker import namespace_of
    from omni_flow.data.client import MemoryManagerClient
    from omni_flow.data.launch import start
    from omni_flow.data.pool_spec import PoolSpec
    from omni_flow.data.server_config import ServerConfig
    from omni_flow.testing import tiny_checkpoint

    checkpoint = tiny_checkpoint("deepseek_v2", folder / "model")
    (checkpoint / "tokenizer.json").unlink()
    page_bytes = kv_layout(json.loads((checkpoint / "config.json").read_text())).page_bytes(PAGE, "float32")
    l1 = QUOTA + 64 + 257 if tight else 2 * (rounds + WARM) * (PAGES + 1) + QUOTA + 400
    pool = PoolSpec(name="kv", page_bytes=page_bytes, l1_pages=l1, l2_pages=3000, padding=1, policy="lru")
    path = str(folder / "memory.sock")
    manager = start(ServerConfig(path=path, pools=(pool,), huge=False, movers=(("copy",),)))
    config = EngineConfig(
        model=str(checkpoint), device="cpu", page_size=PAGE, max_tokens=QUOTA * PAGE, context=40_960, chunk=8192,
        manager=path, pool="kv", awake=1.0,
    )  # fmt: skip
    samples: dict[str, list[float]] = {}
    try:
        async with SGLangEngine(config) as engine:
            with MemoryManagerClient(path) as client:
                rig = Rig(engine, client, namespace_of(config).root())
                for at in range(rounds + WARM):
                    figures = await rig.round()
                    for name, value in figures.items() if at >= WARM else ():
                        samples.setdefault(name, []).append(value)
    finally:
        manager.terminate()
        manager.wait(20)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tight", action="store_true", help="an L1 of the size that the quota needs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        samples = asyncio.run(measure(options.rounds, Path(work), options.tight))
    if options.json:
        print(json.dumps({name: statistics.median(values) for name, values in samples.items()}))
        return
    print(machine.described())
    for name, values in samples.items():
        print(f"{name:32} {statistics.median(values):8.3f}   ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
