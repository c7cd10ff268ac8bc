"""What `faults.py` breaks: a memory manager with three tiers and two engines over it, all real processes.

Every prompt has four whole chunks of prefill and a tail of `TAIL` tokens. A cold request computes the tail as its
fifth chunk, behind the pages of the first four; a request that finds those pages computes the same tail behind the same
pages. Both run the same kernels on the same shapes, alone in their batch, so their tokens must be equal to the bit, in
bfloat16 on a GPU too.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from compute import CONFIG

from omni_flow.compute.checkpoint import read_config
from omni_flow.compute.engine import EndEvent, Request, TokenEvent, Tokens
from omni_flow.compute.kv_layout import kv_layout
from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.compute.sglang.pages import LOT
from omni_flow.compute.sglang.worker import namespace_of
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.device_memory import Sharing
from omni_flow.data.identity import PageHash
from omni_flow.data.launch import start
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

TAIL: Final = 5
CHUNKS: Final = 4
LAYERS: Final = 4
WAITING: Final = 3
GARBAGE: Final = 16
L3_PAGES: Final = 900
QUARANTINE_S: Final = 0.25
"""How long slots that a killed engine had reserved stay closed on a device, where its kernels may still write."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a run.

    Args:
        page, chunk: tokens.
        quota: pages an engine may hold: room for one prompt, not for two.
        vocabulary: token ids prompts are made of.
        answer, long: tokens of an answer; of one that is broken in the middle.
    """

    page: int
    chunk: int
    quota: int
    vocabulary: int
    answer: int
    long: int

    @property
    def cached(self) -> int:
        """Tokens of a prompt that another request with it need not compute."""
        return CHUNKS * self.chunk

    @property
    def prompt_pages(self) -> int:
        """Whole pages of a prompt."""
        return self.cached // self.page


TINY: Final = Size(page=16, chunk=64, quota=32, vocabulary=256, answer=16, long=160)
FULL: Final = Size(page=64, chunk=512, quota=64, vocabulary=8192, answer=32, long=400)


@dataclass(slots=True)
class Answer:
    """Of one request."""

    tokens: list[int]
    cached: int
    hits: tuple[int, int, int]


class Course:
    """A request under way: its tokens so far, how it ended, and a way to cancel it."""

    def __init__(self, engine: SGLangEngine, request: Request) -> None:
        self.tokens: list[int] = []
        self.end: EndEvent | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run(engine, request))

    async def _run(self, engine: SGLangEngine, request: Request) -> Answer:
        try:
            async for event in engine.generate(request):
                if isinstance(event, TokenEvent):
                    self.tokens.append(event.token)
                    self._news.set()
                else:
                    self.end = event
            assert self.end is not None
            return Answer(self.tokens, self.end.cached_tokens, self.end.hits)
        finally:
            self._news.set()

    def __await__(self) -> Any:
        return self._task.__await__()

    async def reached(self, count: int) -> None:
        """Until there are `count` tokens.

        Raises:
            RuntimeError: it ended before.
        """
        while len(self.tokens) < count:
            if self._task.done():
                raise RuntimeError(f"a request ended after {len(self.tokens)} of {count} tokens")
            self._news.clear()
            await self._news.wait()

    @property
    def over(self) -> bool:
        return self._task.done()

    async def cancel(self) -> None:
        """As a client that goes away."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def error(self) -> BaseException | None:
        """What it was refused with, or died of; None: it was served."""
        await asyncio.wait([self._task])
        return self._task.exception()


class Rig:
    """See the module.

    Args:
        work: a folder for everything.
        tiny: on the CPU, with a model of three layers, in float32.
        sharing: how the arena on the device is shared.
    """

    def __init__(self, work: Path, tiny: bool, sharing: Sharing) -> None:
        self.tiny = tiny
        self._sharing = sharing
        self.size = TINY if tiny else FULL
        self._folder = self._checkpoint(work)
        self._path = str(work / "memory.sock")
        self._work = work
        self._seed = 0
        self.config = self._engine_config()
        self.manager = self._start_manager()
        self.client = MemoryManagerClient(self._path, name="faults")
        self.a, self.b = SGLangEngine(self.config), SGLangEngine(self.config)

    def _checkpoint(self, work: Path) -> Path:
        folder = work / "model"
        if self.tiny:
            from omni_flow.testing import tiny_checkpoint

            return tiny_checkpoint("deepseek_v2", folder)
        folder.mkdir()
        small = {
            "num_hidden_layers": LAYERS, "n_routed_experts": 16, "vocab_size": FULL.vocabulary,
            "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(CONFIG | small))
        return folder

    def _engine_config(self) -> EngineConfig:
        size = self.size
        common: dict[str, Any] = {
            "model": str(self._folder), "page_size": size.page, "max_tokens": size.quota * size.page,
            "chunk": size.chunk, "max_running": 8, "max_waiting": WAITING, "manager": self._path, "pool": "kv",
        }  # fmt: skip
        if self.tiny:
            return EngineConfig(**common, device="cpu")
        graphs = {"cuda_graph_bs_decode": [1, 2, 4, 8], "disable_prefill_cuda_graph": True}
        return EngineConfig(
            **common, device="cuda", dtype="bfloat16", threads=0, overlap=True, context=8192, revision="faults",
            load_format="dummy", extra=graphs,
        )  # fmt: skip

    def _start_manager(self) -> subprocess.Popen[bytes]:
        size, layout = self.size, kv_layout(read_config(self._folder))
        page_bytes = layout.page_bytes(size.page, self.config.dtype)
        l1_pages = 2 * (size.quota + LOT) + 65
        place = {} if self.tiny else {"l1_device": 0, "planes": LAYERS, "death_quarantine_s": QUARANTINE_S}
        pool = PoolSpec(
            name="kv", page_bytes=page_bytes, l1_pages=l1_pages, l2_pages=l1_pages, l3_pages=2 * L3_PAGES, padding=1,
            policy="lru", **place,
        )  # fmt: skip
        cap = str(L3_PAGES * (page_bytes + 8192))
        movers = (
            ("copy",) if self.tiny else ("cuda-copy",),
            ("{python}", "-m", "omni_flow.data.ssd.mover", "{path}", str(self._work / "l3"), cap),
        )
        config = ServerConfig(path=self._path, pools=(pool,), huge=False, movers=movers, device_memory=self._sharing)
        return start(config, log=str(self._work / "memory.log"))

    async def start(self) -> None:
        """Start both engines, until they and the manager's movers serve."""
        await asyncio.gather(self.a.start(), self.b.start())
        await self.until(
            lambda: bool(self.client.stats().get("pool_l3_on/kv")) and self.client.stats()["job_movers"] >= 2,
            "the movers are there",
        )

    async def until(self, holds: Callable[[], bool], what: str, seconds: float = 30.0) -> float:
        """Wait for something of the manager; returns the seconds it took.

        Raises:
            TimeoutError: it did not come about.
        """
        began = time.perf_counter()
        while not holds():
            if time.perf_counter() - began > seconds:
                raise TimeoutError(f"not within {seconds} s: {what}")
            await asyncio.sleep(0.001)
        return time.perf_counter() - began

    # -- requests -----------------------------------------------------------------------------------------------

    def prompt(self, tokens: int | None = None) -> list[int]:
        """A prompt nobody has seen; `tokens` behind the whole chunks it has by default."""
        self._seed += 1
        rng = random.Random(self._seed)
        count = self.size.cached + TAIL if tokens is None else tokens
        return [rng.randrange(3, self.size.vocabulary) for _ in range(count)]

    def ask(self, engine: SGLangEngine, prompt: Sequence[int], count: int | None = None, **more: Any) -> Course:
        """Start a request for `count` greedy tokens."""
        sampling = Sampling(max_tokens=count or self.size.answer, ignore_eos=True)
        return Course(engine, Request(spans=[Tokens(prompt)], sampling=sampling, **more))

    async def cold(self, prompt: Sequence[int], count: int | None = None) -> list[int]:
        """The tokens of a request that shares nothing with any other: those of a tenant of its own, on B."""
        answer = await self.ask(self.b, prompt, count, tenant=os.urandom(16))
        if answer.cached:
            raise RuntimeError(f"{answer.cached} tokens of a new tenant were cached")
        return answer.tokens

    async def warm(self, engine: SGLangEngine) -> None:
        """Have an engine compile what it compiles on first use: a kill is to come in the middle of decoding."""
        tenant = os.urandom(16)
        await self.ask(engine, self.prompt(), 4, tenant=tenant)
        await asyncio.gather(
            *(self.ask(engine, self.prompt(self.size.chunk + TAIL), 4, tenant=tenant) for _ in range(2))
        )

    def keys(self, prompt: Sequence[int]) -> list[PageHash]:
        """Names of the pages that another request with this prompt can use."""
        root = namespace_of(self.config).root()
        return PageChain(root).upto(list(prompt), len(prompt) - 1, self.size.page)

    # -- pages --------------------------------------------------------------------------------------------------

    def tiers(self, prompt: Sequence[int]) -> list[int]:
        """Per page of a prompt the tiers that have it, as bits."""
        found: list[int] = self.client.probe("kv", self.keys(prompt)).tolist()
        return found

    async def unpin(self) -> None:
        """Have both engines compute other prompts, until no page of an earlier one is pinned by them."""
        for engine in (self.a, self.b):
            for _ in range(3):
                await self.ask(engine, self.prompt(), 1)

    async def push(self, prompt: Sequence[int], reached: Callable[[list[int]], bool]) -> int:
        """Store other pages until the tiers of a prompt's pages are as wanted; returns how many that took."""
        for pushed in range(4 * L3_PAGES // GARBAGE):
            if reached(self.tiers(prompt)):
                return pushed * GARBAGE
            room = self.client.reserve("kv", GARBAGE, timeout=20)
            self.client.commit("kv", room.token, [PageHash(os.urandom(32)) for _ in range(GARBAGE)])
            await asyncio.sleep(0)
        raise RuntimeError(f"pages are in tiers {sorted(set(self.tiers(prompt)))} whatever is stored")

    async def settled(self, engine: SGLangEngine) -> tuple[bool, dict[str, int]]:
        """Whether an idle engine holds nothing but pages it has pinned for later, as it and the manager count.

        The engine gives pages back without waiting, so the manager may count them a moment longer. On a device they go
        back behind an event, so it may count more reserved than the engine."""
        busy = ("running", "waiting", "loading", "held", "locked")
        until = time.monotonic() + 30
        while True:
            counts = dict(await engine.stats())
            rows = self.client.inspect()
            reserved, pinned = next(row["held"]["kv"] for row in rows if row["name"] == f"engine {engine.pid}")
            sound = (
                not any(counts[name] for name in busy)
                and counts["available"] + counts["pinned"] == counts["quota"] == self.size.quota
                and pinned == counts["pinned"]
                and (reserved == counts["leased"] if self.tiny else reserved >= counts["leased"])
                and not self.client.check()
            )
            if sound or time.monotonic() > until:
                break
        shown = {name: counts[name] for name in (*busy, "pinned", "leased", "available")}
        return sound, shown | {"manager_reserved": reserved, "manager_pinned": pinned}

    def mover(self, name: str) -> int:
        """Process id of a mover."""
        return next(int(row["pid"]) for row in self.client.inspect() if row["name"] == name)

    async def restart_b(self) -> float:
        """Another engine in the place of B, which has died; returns the seconds until it serves."""
        await self.b.close()
        self.b = SGLangEngine(self.config)
        began = time.perf_counter()
        await self.b.start()
        return time.perf_counter() - began

    async def close(self) -> int:
        """End everything that still lives; returns the manager's exit status."""
        await asyncio.gather(self.a.close(), self.b.close())
        self.client.close()
        self.manager.terminate()
        return self.manager.wait(20)
