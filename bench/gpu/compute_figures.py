"""What `compute.py` measures, one method a step."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from compute_engines import (
    PAGE,
    Plain,
    PlainEngine,
    answer,
    device_idle,
    device_rate,
    disk_rate,
    first_and_second,
    first_token,
    let_run,
    ours,
    wait_for_jobs,
)

VOCABULARY = 102_400
TINY = 64
"""Lengths are divided by it with --tiny."""


def prompts(count: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary // 100, vocabulary * 7 // 8) for _ in range(length)] for _ in range(count)]


class Figures:
    """The measurements, one method a figure; all append to `out`."""

    def __init__(self, plain: Plain | PlainEngine, a: Any, b: Any, options: argparse.Namespace) -> None:
        self.plain, self.a, self.b = plain, a, b
        self.pairs: int = options.pairs
        self.tiny: bool = options.tiny
        self.page = PAGE // 16 if self.tiny else PAGE
        self._stops: bool = options.others == "stop"
        self._let_run = {"plain": plain.let_run, "a": partial(let_run, a), "b": partial(let_run, b)}
        self._running = set(self._let_run)
        self._kept: str | None = options.out
        self.out: dict[str, float] = {}
        self.samples: dict[str, list[float]] = {}
        self.steps: dict[str, dict[str, float]] = {}
        self.failed: list[str] = []
        self.seed = 1000

    def only(self, *names: str) -> None:
        """Stop all engines but these, of plain, a and b."""
        run = set(names if self._stops else self._let_run)
        for name in self._running ^ run:
            with contextlib.suppress(ProcessLookupError):  # it has died, as its next request says
                self._let_run[name](name in run)
        self._running = run

    def note(self, name: str, samples: list[float]) -> None:
        """A figure: the median of its samples."""
        self.samples[name] = samples
        self.out[name] = statistics.median(samples)
        self.keep()

    def note_steps(self, name: str, runs: list[tuple[float, Any]]) -> None:
        """The steps of the median one of these runs (seconds, end event)."""
        from omni_flow.compute.sglang.timeline import durations

        _, end = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
        self.steps[name] = durations(end.timeline)

    def keep(self) -> None:
        """Write everything so far."""
        if self._kept:
            everything = {"figures": self.out, "samples": self.samples, "steps_ms": self.steps}
            Path(self._kept).write_text(json.dumps(everything))

    def table(self) -> str:
        """The steps to the first token, in ms, a column for each place where the prompt lay."""
        from omni_flow.compute.sglang.timeline import STEPS

        names = list(self.steps)
        rows = {step for took in self.steps.values() for step in took}
        lines = [f"{'steps to the first token, ms':32}" + "".join(f" {name:>8}" for name in names)]
        for step in sorted(rows, key=STEPS.index):
            lines.append(f"{step:32}" + "".join(f" {self.steps[name].get(step, 0.0):8.3f}" for name in names))
        return "\n".join(lines)

    async def equality(self) -> None:
        """equal_tokens*: 48 greedy tokens of prompts alone in their batch, cold and then cached."""
        same: dict[str, list[float]] = {"equal_tokens": [], "equal_tokens_cached": [], "sglang_self_equal": []}
        for length in (65, 127, 128, 129, 511, 512, 513, 1000, 4097, 9000, 20_000):
            ids = self.fresh(1, length)
            (_, theirs), (_, mine) = await self._run("plain")(ids, 48), await self._run("ours")(ids, 48)
            same["equal_tokens"].append(float(theirs == mine))
            (_, again), (_, mine) = await self._run("plain")(ids, 48), await self._run("ours")(ids, 48)
            same["equal_tokens_cached"].append(float(again == mine))
            same["sglang_self_equal"].append(float(theirs == again))
        self.samples |= same
        self.out |= {name: statistics.mean(shares) for name, shares in same.items()}

    async def warm(self) -> None:
        """What is compiled on first use is compiled."""
        ids = self.fresh(64, 512)
        long = self.fresh(1, 9000)
        for name in ("ours", "plain"):
            run = self._run(name)
            for prompts_, count in ((ids, 8), (ids, 2), (ids[:16], 2), (ids[:1], 2), (long, 2), (long, 2)):
                await run(prompts_, count)
        self.only("b")
        await ours(self.b, long, 2)

    def fresh(self, count: int, length: int) -> list[list[int]]:
        self.seed += 1
        return prompts(count, self.length(length), self.seed, 256 if self.tiny else VOCABULARY)

    def length(self, tokens: int) -> int:
        """Of a prompt or an answer."""
        return max(1, tokens // TINY) if self.tiny else tokens

    async def beside(self) -> None:
        """prefill_1_beside and decode_1_beside: of one request while all engines run."""
        self._stops, stops = False, self._stops
        try:
            await self.throughput(1, 256, "_beside")
        finally:
            self._stops = stops

    async def throughput(self, batch: int, new: int, suffix: str = "") -> None:
        """prefill_N, decode_N and whether the tokens are equal."""
        prefill, decode, speed, same = [], [], [], []
        new = self.length(new)
        for _ in range(self.pairs):
            ids = self.fresh(batch, 512)
            times: dict[str, tuple[float, float, list[list[int]]]] = {}
            for name in ("plain", "ours") if self.seed % 2 else ("ours", "plain"):
                run = self._run(name)
                cold, _ = await run(ids, 1)
                one, _ = await run(ids, 1)
                whole, tokens = await run(ids, new + 1)
                times[name] = (cold, whole - one, tokens)
            for name, (cold, longer, _) in times.items():
                self.samples.setdefault(f"{name}_prefill_s_{batch}{suffix}", []).append(cold)
                self.samples.setdefault(f"{name}_decode_s_{batch}{suffix}", []).append(longer)
            prefill.append(times["plain"][0] / times["ours"][0])
            decode.append(times["plain"][1] / times["ours"][1])
            speed.append(batch * new / times["ours"][1])
            same += [float(p == m) for p, m in zip(times["plain"][2], times["ours"][2], strict=True)]
        self.note(f"ratio_to_sglang.prefill_{batch}{suffix}", prefill)
        self.note(f"ratio_to_sglang.decode_{batch}{suffix}", decode)
        self.note(f"decode_tokens_per_s_{batch}{suffix}", speed)
        self.out[f"equal_tokens_{batch}{suffix}"] = statistics.mean(same)

    def _run(self, name: str) -> Any:
        async def plain(ids: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
            self.only("plain")
            await device_idle()
            if isinstance(self.plain, PlainEngine):
                return await ours(self.plain.engine, ids, count)
            return await asyncio.get_running_loop().run_in_executor(None, self.plain, ids, count)

        async def mine(ids: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
            self.only("a")
            await device_idle()
            return await ours(self.a, ids, count)

        return plain if name == "plain" else mine

    async def _recomputed(self) -> list[list[int]]:
        """recompute_ms, of three 32 k prompts; the last of them, which is cached now."""
        times = []
        for _ in range(3):
            ids = self.fresh(1, 32_768)
            times.append((await self._run("ours")(ids, 1))[0] * 1e3)
        self.note("recompute_ms", times)
        return ids

    async def cached(self) -> None:
        """ttft_l1_ratio, ttft_l1_ms and recompute_ms of a 32 k prompt; tail_extend_ms."""
        ids = await self._recomputed()
        plain, mine = self._run("plain"), self._run("ours")
        await plain(ids, 1)
        pairs = [((await plain(ids, 1))[0], (await mine(ids, 1))[0]) for _ in range(self.pairs)]
        self.note("ttft_l1_ms", [m * 1e3 for _, m in pairs])
        self.note("ttft_l1_ratio", [m / p for p, m in pairs])
        base = self.fresh(1, 8192)[0]
        await mine([base], 1)
        await plain([base], 1)
        tails = []
        for _ in range(self.pairs):
            ids = [base + self.fresh(1, 64)[0]]
            tails.append(((await plain(ids, 1))[0] * 1e3, (await mine(ids, 1))[0] * 1e3))
        self.note("tail_extend_ms", [m for _, m in tails])
        self.note("sglang_tail_extend_ms", [p for p, _ in tails])

    async def tiers(self, client: Any, keys_of: Any, page_bytes: int, ssd: Path) -> None:
        """ttft_l2_ratio, ttft_l3_ratio.

        Args:
            client: of the memory manager.
            keys_of: the page keys of a prompt.
            ssd: folder of L3.
        """
        from omni_flow.data.messages import L1, L2, L3

        (prompt,) = await self._recomputed()
        self.only("a")
        self.note_steps("cold", [await self._first(self.fresh(1, 512)[0]) for _ in range(9)])
        runs = [await self._first(prompt) for _ in range(5)]
        self.note_steps("l1", runs)
        self.note("ttft_l1_streamed_ms", [seconds * 1e3 for seconds, _ in runs])
        pages = len(keys_of(prompt))
        await self._fetched(client, keys_of)
        rates = {L2: 1e11 if self.tiny else device_rate(), L3: disk_rate(ssd)}
        self.out |= {"l2_gb_per_s": rates[L2] / 1e9, "l3_gb_per_s": rates[L3] / 1e9}
        for name, tier, above, count in (("l2", L2, L1, self.pairs * 2 // 5), ("l3", L3, L1 | L2, self.pairs // 8)):
            runs = []
            for _ in range(max(3, count)):
                prompt = await self._sunk(client, keys_of, tier, above)
                seconds, end = await self._first(prompt)
                if end.hits[(L1, L2, L3).index(tier)] != pages * self.page:
                    raise RuntimeError(f"{end.hits} tokens were found in L1, L2 and L3, not all in {name}")
                runs.append((seconds, end))
            times = [seconds * 1e3 for seconds, _ in runs]
            self.note_steps(name, runs)
            self.note(f"ttft_{name}_ms", times)
            limit = self.out["ttft_l1_streamed_ms"] + pages * page_bytes / rates[tier] * 1e3
            self.note(f"ttft_{name}_ratio", [ms / limit for ms in times])
        self.out["ttft_l2_over_recompute"] = self.out["ttft_l2_ms"] / self.out["recompute_ms"]

    async def _first(self, prompt: list[int]) -> tuple[float, Any]:
        await device_idle()
        return await first_token(self.a, prompt)

    async def _fetched(self, client: Any, keys_of: Any) -> None:
        """fetch_l2_ms, ttft_pool_ms: the two parts of a hit in L2. The manager is asked by the bench to bring the pages
        to L1; then they are there, and no engine has pinned them."""
        from omni_flow.data.messages import L1, L2

        fetches, runs = [], []
        for _ in range(max(3, self.pairs // 8)):
            prompt = await self._sunk(client, keys_of, L2, L1)
            began = time.perf_counter()
            if not client.fetch("kv", keys_of(prompt)).all():
                raise RuntimeError("pages of L2 were not brought to L1")
            fetches.append((time.perf_counter() - began) * 1e3)
            runs.append(await self._first(prompt))
        self.note("fetch_l2_ms", fetches)
        self.note("ttft_pool_ms", [seconds * 1e3 for seconds, _ in runs])
        self.note_steps("pool", runs)

    async def _sunk(self, client: Any, keys_of: Any, tier: int, above: int) -> list[int]:
        """A prompt whose pages lie in `tier` and none of them in a tier above: others were asked until it was so."""
        from omni_flow.data.messages import L3

        prompt: list[int] = []
        for _ in range(20):
            if tier != L3 or not prompt:  # pages that have a copy in L3 would not stop in L2
                (prompt,) = self.fresh(1, 32_768)
            await ours(self.a, [prompt], 1)
            keys = keys_of(prompt)
            at = client.probe("kv", keys)
            while at.all() and (at & above).any():
                await ours(self.a, self.fresh(1, 2048), 1)
                wait_for_jobs(client)
                at = client.probe("kv", keys)
            if (at & tier).all():
                return prompt
        raise RuntimeError(f"20 times pages went past tier {tier} or were dropped on their way")

    async def roles(self) -> None:
        """pd_extra_ms, pd_gap_ms, pd_computed_tokens and whether the tokens are equal."""
        self.only("a", "b")
        extra, gap, computed, same, alike = [], [], [], [], []
        for _ in range(self.pairs):
            whole, split = self.fresh(2, 4096 + 37)
            await device_idle()
            began = time.perf_counter()
            _, first, _ = await first_and_second(self.a, whole)
            alone = first - began
            await device_idle()
            began = time.perf_counter()
            _, handed = await ours(self.a, [split], 1)
            first = time.perf_counter()
            tokens, end = await answer(self.b, split + handed[0], 1)
            gap.append((time.perf_counter() - first) * 1e3)
            extra.append((first - began - alone) * 1e3)
            computed.append(end.prompt_tokens - end.cached_tokens)
            _, both = await ours(self.a, [split], 2)
            same.append(float(both[0] == handed[0] + tokens))
            _, again = await ours(self.a, [split + handed[0]], 1)
            alike.append(float(again[0] == tokens))
        self.note("pd_extra_ms", extra)
        self.note("pd_gap_ms", gap)
        self.note("pd_computed_tokens", computed)
        self.out["pd_equal_tokens"] = statistics.mean(same)
        self.out["pd_equal_to_own"] = statistics.mean(alike)

    async def turns(self) -> None:
        """turns_ratio, and the same where nothing is cached."""
        self.only("a")
        ratios, plain_ratios = [], []
        for _ in range(max(3, self.pairs // 4)):
            history: list[int] = []
            times = []
            for _ in range(10):
                history += self.fresh(1, 512)[0]
                await device_idle()
                times.append((await ours(self.a, [history], 1))[0])
                _, tokens = await ours(self.a, [history], self.length(256))
                history += tokens[0]
            ratios.append(times[-1] / times[0])
            new = self.fresh(1, 10 * 512 + 9 * 256)
            await device_idle()
            plain_ratios.append((await ours(self.a, new, 1))[0] / times[0])
        self.note("turns_ratio", ratios)
        self.note("turns_ratio_recomputed", plain_ratios)
