"""Fixed rows and step hooks of engines on one GPU, held against plain PyTorch: `python bench/gpu/rows.py [--json]`.

Five engines start at once: a small Qwen3 (MHA) with a step hook, a small DeepSeek-V2 (MLA) with the widths of V2-Lite's
attention, the same under SGLang's Triton attention and without captured graphs ("launched"), and V2-Lite at full size
with random weights, once with captured graphs and once without. bf16, pages of 64. What fails for "deepseek" and passes
for "launched" is wrong in graphs, or under the engine's own attention (--attention triton tells which).

rows, MODEL       hidden states of three steps over the same rows, for rows that all see each other, causal ones, a mix,
                  and two sessions in one forward, against PyTorch in fp32: the median of the rows' relative errors. It
                  may be twice that of PyTorch in bf16, and against rows that see what they should not it is larger
text, MODEL       logits behind the context are bit-equal before and after steps behind it
traffic, MODEL    tokens of requests that decode while steps run are those of the same requests alone
graph             V2-Lite: hidden states by a graph against the same kernels launched one by one; step_ms: of the engine
                  without what its socket costs; seen_ms: as a role sees it
hook              two codebooks of a step hook: how far a chosen code's score lies below the best one in PyTorch, in
                  deviations of the scores

--blocking waits for each kernel, so that an error is told where it is made.
--tiny runs every step on a CPU in fp32 with smaller models: it shows that the script works, its times mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from checks import Checks, device_says, last_lines
from compute import CONFIG, metadata_folder
from rows_engines import decode, ids, logits, row_errors, together, with_weights, write_deepseek

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "compute"))  # references, which the tests use too, and the step hook

PAGE = 64
CONTEXT = 8192
QWEN = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": CONTEXT,
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 256, "intermediate_size": 1024, "bos_token_id": 0, "eos_token_id": 1,
    "attention_dropout": 0.0,
}  # fmt: skip
TINY = SMALL | {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32, "intermediate_size": 128,
}  # fmt: skip
GPU_FLAGS = {"cuda_graph_bs_decode": [1, 2, 4, 8], "disable_prefill_cuda_graph": True, "mem_fraction_static": 0.85}


class Rows:
    """The checks.

    Args:
        scale: lengths are divided by it.
    """

    def __init__(self, checks: Checks, work: Path, options: argparse.Namespace) -> None:
        self.checks = checks
        self.work = work
        self.tiny: bool = options.tiny
        self.scale = 8 if self.tiny else 1
        self.attention: dict[str, str] = {"attention_backend": options.attention} if options.attention else {}

    def engine(self, name: str, hook: Any = None, **more: Any) -> Any:
        """An engine over the checkpoint of that name, not started."""
        from omni_flow.compute.sglang.config import EngineConfig
        from omni_flow.compute.sglang.kernel import SGLangEngine

        folder = str(self.work / name)
        if self.tiny:
            more.pop("extra", None)
            config = EngineConfig(model=folder, device="cpu", page_size=16, max_tokens=4096, context=1024, **more)
        else:
            flags = GPU_FLAGS | more.pop("extra", {}) | self.attention
            config = EngineConfig(
                model=folder, device="cuda", dtype="bfloat16", page_size=PAGE, max_tokens=512 * PAGE, context=CONTEXT,
                threads=0, overlap=hook is None, extra=flags, **more,
            )  # fmt: skip
        return SGLangEngine(config, step_hook=hook)

    async def rows(self, name: str, engine: Any, exact: Any, rounded: Any) -> None:
        """`rows` and `text` of one model."""
        import rows_kit
        import torch

        from omni_flow.compute.engine import Tokens

        embed = exact.model.embed_tokens.weight.detach().float()
        vocabulary, hidden = embed.shape
        texts = [ids(1, 150 // self.scale, vocabulary), ids(2, 333 // self.scale, vocabulary)]
        counts = [300 // self.scale, 77 // self.scale]
        mixed = [at % 2 == 0 for at in range(counts[0])]

        def off(got: Any, text: list[int], given: Any, causal: Any, model: Any = exact) -> float:
            rows = torch.cat((embed[text], torch.tensor(given).to(embed)))
            return row_errors(got, rows_kit.states(model, rows, len(given), causal))

        def judge(
            what: str, errors: list[float], got: Any, text: list[int], given: Any, causal: Any, wrong: Any
        ) -> None:
            rows = torch.cat((embed[text], torch.tensor(given).to(embed)))
            floor = off(rows_kit.states(rounded, rows, len(given), causal), text, given, causal)
            other = off(got, text, given, wrong)
            worst = max(errors)
            self.checks.check(
                f"rows, {name}: {what}", worst <= 2 * floor + 1e-4 and other > 2 * worst,
                error=[f"{e:.2g}" for e in errors],
                bf16_torch=f"{floor:.2g}", against_other_flags=f"{other:.2g}",
            )  # fmt: skip

        before = await logits(engine, texts[0])
        before = await logits(engine, texts[0])  # the second time behind the cached context, as below
        for what, causal, wrong in (
            ("all see each other", None, [True] * counts[0]),
            ("causal", [True] * counts[0], None),
            ("every other one causal", mixed, [not flag for flag in mixed]),
        ):
            async with engine.fixed_rows([Tokens(texts[0])], counts[0]) as session:
                errors = []
                for step in range(3):
                    given = rows_kit.noise(step, counts[0], hidden)
                    got = await session.step(given, causal)
                    errors.append(off(got, texts[0], given, causal))
                judge(what, errors, got, texts[0], given, causal, wrong)
        async with (
            engine.fixed_rows([Tokens(texts[0])], counts[0]) as first,
            engine.fixed_rows([Tokens(texts[1])], counts[1]) as second,
        ):
            given = [rows_kit.noise(10 + at, count, hidden) for at, count in enumerate(counts)]
            both, forwards = await together(engine, (first, given[0], mixed), (second, given[1], None))
            errors = [off(both[0], texts[0], given[0], mixed), off(both[1], texts[1], given[1], None)]
            judge("two sessions", errors, both[1], texts[1], given[1], None, [True] * counts[1])
            self.checks.check(f"rows, {name}: two sessions are one forward", forwards == 1, forwards=forwards)
        after = await logits(engine, texts[0])
        self.checks.check(f"text, {name}: logits behind the context", bool(np.array_equal(before, after)))

    async def traffic(self, name: str, engine: Any, vocabulary: int, hidden: int) -> None:
        """Requests decode while two sessions step."""
        import rows_kit

        from omni_flow.compute.engine import Tokens

        prompts = [ids(20 + at, (100 + 50 * at) // self.scale, vocabulary) for at in range(4)]
        rows, steps = 128 // self.scale, 0
        for _ in range(2):  # the second time with the prompts cached, as below
            alone = await decode(engine, prompts, 200 // self.scale)
        decoding = asyncio.ensure_future(decode(engine, prompts, 200 // self.scale))
        async with (
            engine.fixed_rows([Tokens(prompts[0])], rows) as first,
            engine.fixed_rows([Tokens(prompts[1])], rows) as second,
        ):
            given = rows_kit.noise(5, rows, hidden)
            wanted = await first.step(given)
            same = True
            while not decoding.done():
                got, _ = await asyncio.gather(first.step(given), second.step(given))
                same, steps = same and row_errors(got, wanted) < 5e-2, steps + 1
            quiet, _ = await asyncio.gather(first.step(given), second.step(given))
        tokens = await decoding
        equal = sum(one == other for one, other in zip(tokens, alone, strict=True))
        self.checks.check(f"traffic, {name}: tokens", equal == len(prompts) and steps > 0, equal=equal, steps=steps)
        self.checks.check(f"traffic, {name}: rows", same, quiet=f"{row_errors(quiet, wanted):.2g}")
        counts = await engine.stats()
        self.checks.check(f"traffic, {name}: nothing is held", counts["held"] == counts["locked"] == 0)

    async def graph(self, graph: Any, eager: Any, vocabulary: int, hidden: int) -> None:
        """V2-Lite: a graph against kernels launched one by one.

        The two round differently: a graph has SGLang's second stream, and what rounds sends rows to other experts. They
        may differ twice as much as rows launched alone do from the same rows launched beside those of a second session.
        """
        import rows_kit

        from omni_flow.compute.engine import Tokens

        text = ids(30, 1000 // self.scale, vocabulary)
        for rows in (64, 256, 1024):
            rows //= self.scale
            given = rows_kit.noise(rows, rows, hidden)
            figures: dict[str, Any] = {}
            made = {}
            for name, engine in (("graph", graph), ("eager", eager)):
                async with engine.fixed_rows([Tokens(text)], rows) as session:
                    for _ in range(3):
                        made[name] = await session.step(given)
                    inside, seen = [], []
                    for _ in range(15):
                        counts, begin = await engine.stats(), time.perf_counter()
                        await session.step(given)
                        seen.append((time.perf_counter() - begin) * 1e3)
                        inside.append(((await engine.stats())["row_us"] - counts["row_us"]) / 1e3)
                figures |= {
                    f"{name}_step_ms": round(statistics.median(inside), 3),
                    f"{name}_spread_ms": [round(min(inside), 3), round(max(inside), 3)],
                    f"{name}_seen_ms": round(statistics.median(seen), 2),
                }
            async with (
                eager.fixed_rows([Tokens(text)], rows) as first,
                eager.fixed_rows([Tokens(text)], rows) as second,
            ):
                both, forwards = await together(eager, (first, given, None), (second, given, None))
            floor = row_errors(both[0], made["eager"])
            error = row_errors(made["graph"], made["eager"])
            self.checks.check(
                f"graph: {rows} rows", forwards == 1 and error < max(1e-3, 2 * floor), error=f"{error:.2g}",
                beside_another=f"{floor:.2g}",
                bit_equal=bool(np.array_equal(made["graph"], made["eager"])), **figures,
            )  # fmt: skip
        sizes = (await graph.stats())["row_sizes"]
        self.checks.check("graph: one for each size, one made at the start", sizes == 3, sizes=sizes)

    async def hook(self, engine: Any, exact: Any) -> None:
        """Codes of a step hook against PyTorch, which is given what the engine has chosen so far."""
        import rows_kit
        import step_hooks
        import torch

        from omni_flow.compute.engine import Request, TokenEvent, Tokens
        from omni_flow.compute.sampling import Sampling

        vocabulary, hidden = exact.model.embed_tokens.weight.shape
        heads, _ = step_hooks.heads(hidden)

        async def one(seed: int, length: int, codes: int | None) -> tuple[list[int], list[TokenEvent], int]:
            prompt = ids(seed, length // self.scale, vocabulary)
            steps = None if codes is None else {"codes": codes}
            asked = Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=40, ignore_eos=True), steps=steps)
            events = [event async for event in engine.generate(asked) if isinstance(event, TokenEvent)]
            return prompt, events, codes or 0

        for way in ("cold", "cached"):
            answers = await asyncio.gather(one(40, 200, 30), one(41, 90, 12), one(42, 70, None), one(43, 500, 40))
            behind, equal, total = 0.0, 0, 0
            right = True
            for prompt, events, codes in answers:
                tokens, emitted = [event.token for event in events], [event.emitted for event in events]
                right &= [codes is not None for codes in emitted] == [step < codes for step in range(40)]
                right &= tokens[:codes] == [step_hooks.MARK] * codes
                rows = rows_kit.step_inputs(exact, prompt, emitted[:-1], tokens[:-1])
                found = torch.from_numpy(rows_kit.states(exact, rows, 40, [True] * 40))
                for state, token, line in zip(found, tokens, emitted, strict=True):
                    scores = [exact.lm_head.weight.detach().float().cpu() @ state]
                    if line is not None:
                        scores = list(heads @ state)
                    for score, chosen in zip(scores, [token] if line is None else line, strict=True):
                        behind = max(behind, float((score.max() - score[chosen]) / score.std()))
                        equal += int(score.argmax()) == chosen
                        total += 1
            self.checks.check(
                f"hook, {way}: codes and text", right and behind < 0.2, furthest_behind=f"{behind:.2g}",
                same_as_pytorch=f"{equal} of {total}",
            )  # fmt: skip


async def measure(checks: Checks, options: argparse.Namespace, work: Path) -> None:
    """Everything; what fails is told and the rest runs."""
    import engine_kit
    import rows_kit
    import step_hooks
    import torch

    device = torch.device("cpu" if options.tiny else "cuda")
    small, large = CONFIG | (TINY if options.tiny else SMALL), CONFIG | (TINY if options.tiny else {})
    write_deepseek(work / "deepseek", small)
    if options.tiny:
        write_deepseek(work / "large", large)
    else:
        (work / "large").mkdir()
        (work / "large" / "config.json").write_text(json.dumps(large))
    models = {
        "qwen": rows_kit.tiny_qwen(work / "qwen", 0.05, **{} if options.tiny else QWEN),
        "deepseek": engine_kit.oracle(work / "deepseek"),
    }
    models["deepseek"].set_experts_implementation("eager")
    dtype = torch.float32 if options.tiny else torch.bfloat16
    rounded = {name: with_weights(model.to(device), dtype) for name, model in models.items()}
    exact = {name: with_weights(copy.deepcopy(model), torch.float32) for name, model in rounded.items()}

    rows = Rows(checks, work, options)
    load = {"load_format": "auto" if options.tiny else "dummy", "rows_at_start": (1024 // rows.scale,)}
    engines = {
        "qwen": rows.engine("qwen", step_hooks.Codes),
        "deepseek": rows.engine("deepseek"),
        "launched": rows.engine("deepseek", rows_graph=False, extra={"attention_backend": "triton"}),
        "graph": rows.engine("large", **load),
        "eager": rows.engine("large", rows_graph=False, extra={"disable_cuda_graph": True}, **load),
    }
    try:
        started = await asyncio.gather(*(engine.start() for engine in engines.values()), return_exceptions=True)
        for name, error in zip(engines, started, strict=True):
            checks.check(f"start, {name}", error is None, **{"error": last_lines(error)} if error else {})
        for name, model in (("launched", "deepseek"), ("deepseek", "deepseek"), ("qwen", "qwen")):
            with checks.step(f"rows, {name}"):
                await rows.rows(name, engines[name], exact[model], rounded[model])
        for name in ("deepseek", "qwen"):
            with checks.step(f"traffic, {name}"):
                await rows.traffic(name, engines[name], *exact[name].model.embed_tokens.weight.shape)
        with checks.step("graph"):
            await rows.graph(engines["graph"], engines["eager"], large["vocab_size"], large["hidden_size"])
        with checks.step("hook"):
            await rows.hook(engines["qwen"], exact["qwen"])
    finally:
        await asyncio.gather(*(engine.close() for engine in engines.values()), return_exceptions=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", help="write the results here as they come")
    parser.add_argument("--tiny", action="store_true", help="on a CPU with small models: whether the script works")
    parser.add_argument("--attention", help="SGLang's attention backend, for all engines; default: the engines' own")
    parser.add_argument("--blocking", action="store_true", help="wait for each kernel; times mean nothing")
    options = parser.parse_args()
    device = "a CPU" if options.tiny else device_says("name,driver_version")
    if options.blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    checks = Checks(options.json, options.out, device)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if not options.tiny:
            (work / "metadata").mkdir()
            metadata_folder(work / "metadata")
            os.environ["SGLANG_PLUGINS"] = "omni_bench"
        asyncio.run(measure(checks, options, work))
    if options.json:
        print(json.dumps(checks.summary()))
    return checks.status


if __name__ == "__main__":
    sys.exit(main())
