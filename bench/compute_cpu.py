"""The engine on a CPU: SmolLM2-135M decode per token against transformers' generate, interleaved, and time to be ready.

`python bench/compute_cpu.py [--json] [--pairs N] [--threads N] [--model FOLDER]`. Same float32 weights, same number of
threads, batch 1, 128 new tokens, greedy; a decode time is the mean over the tokens after the first of one run.

--json prints one object: decode_ratio_to_transformers (median over the pairs), engine_ready_s (engine process started
to first token served, with an engine of its own), engine_ms and transformers_ms per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

NEW = 128


def transformers_run(model: Any, prompt: list[int]) -> tuple[float, list[int]]:
    """Milliseconds per token after the first, and the tokens, of one `generate`."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    times: list[float] = []

    class Clock(BaseStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, streamer=Clock()
        )
    times = times[1:]  # the first call has the prompt
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3, out[0, len(prompt) :].tolist()


async def engine_run(engine: Any, prompt: list[int]) -> tuple[float, list[int]]:
    """The same of one request."""
    from omni_flow.compute.engine import Request, TokenEvent, Tokens
    from omni_flow.compute.sampling import Sampling

    times, tokens = [], []
    request = Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=NEW, ignore_eos=True))
    async for event in engine.generate(request):
        if isinstance(event, TokenEvent):
            times.append(time.perf_counter())
            tokens.append(event.token)
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3, tokens


async def measure(folder: str, pairs: int, threads: int) -> dict[str, Any]:
    """All figures of a run."""
    from omni_flow.compute.sglang.config import EngineConfig
    from omni_flow.compute.sglang.kernel import SGLangEngine

    begin = time.perf_counter()
    engine = SGLangEngine(EngineConfig(model=folder, device="cpu", threads=threads, max_tokens=4096))
    await engine.start()
    try:
        stream = engine.generate(_one_token())
        await anext(stream)
        ready = time.perf_counter() - begin
        await stream.aclose()
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        prompt = [(37 * at) % 40_000 + 100 for at in range(64)]
        engine_ms, other_ms, ratios, same = [], [], [], 0
        transformers_run(model, prompt)
        await engine_run(engine, prompt)
        for _ in range(pairs):
            other, wanted = transformers_run(model, prompt)
            ours, got = await engine_run(engine, prompt)
            engine_ms.append(ours)
            other_ms.append(other)
            ratios.append(ours / other)
            same += got == wanted
    finally:
        await engine.close()
    return {
        "decode_ratio_to_transformers": statistics.median(ratios),
        "engine_ready_s": ready,
        "engine_ms": statistics.median(engine_ms),
        "transformers_ms": statistics.median(other_ms),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "pairs": pairs,
        "pairs_with_equal_tokens": same,
    }


def _one_token() -> Any:
    from omni_flow.compute.engine import Request, Tokens
    from omni_flow.compute.sampling import Sampling

    return Request(spans=[Tokens([1, 2, 3, 4])], sampling=Sampling(max_tokens=1, ignore_eos=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", help="checkpoint folder; default: the demo's SmolLM2, converted on first use")
    options = parser.parse_args()
    if options.model is None:
        from voice_vision_chat.weights import smollm2

        options.model = str(smollm2())
    figures = asyncio.run(measure(options.model, options.pairs, options.threads))
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"{platform.processor() or platform.machine()}, {options.threads} thread(s), Python {platform.python_version()}"
    )
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sglang")))
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}")


if __name__ == "__main__":
    main()
