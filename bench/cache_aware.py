"""`cache_aware` against `round_robin`: two replicas of a language model, requests that share long prefixes.

`python bench/cache_aware.py [--json] [--rounds N] [--prefixes N] [--length BYTES] [--model FOLDER]`. A tiny DeepSeek-V2
unless a checkpoint is named. Two deployments are alive, one of each strategy; requests alternate between them. Every
replica has a memory manager of its own, with room for little more than half of all prefixes, as replicas on different
machines would; `cache_aware` asks the managers what they hold. Each round asks once about each prefix, in a random
order; the first round, which nobody has seen, is not counted.

--json prints one object: for each strategy hit_tokens and prompt_tokens (sums), ttft_ms (median) and its quartiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from importlib.metadata import version
from typing import Any

import omni_flow
from omni_flow import cache_aware
from omni_flow.compute.engine import EndEvent
from omni_flow.compute.sglang.pages import LOT
from omni_flow.control.runtime.methods import Emit, emit
from omni_flow.control.strategies import Balance
from omni_flow.deploy.memory import Memory
from omni_flow.models.deepseek_v2.template import TEMPLATE
from omni_flow.models.engine_role import EngineRole, Turn
from omni_flow.testing import tiny_checkpoint

STRATEGIES: dict[str, str | Balance] = {"cache_aware": cache_aware(load_weight=8), "round_robin": "round_robin"}
PAGE = 16


class Counted(EngineRole):
    """Answers, then says how many tokens of the prompt there were and how many of them were cached."""

    async def ask(self, ctx: Turn, question: str) -> AsyncGenerator[Emit, None]:
        """Give `token` (ids), then `counts`."""
        async with aclosing(self.tokens(ctx, self.prompt(question), self.sampling(ctx))) as tokens:
            async for token in tokens:
                if isinstance(token, EndEvent):
                    yield emit(counts=[token.prompt_tokens, token.cached_tokens])
                else:
                    yield emit(token=token)


def graph_of(balance: str | Balance, init: dict[str, Any]) -> omni_flow.Graph:
    """One role with that strategy."""
    graph = omni_flow.Graph("cache_aware_bench")
    question = graph.placeholder("question", omni_flow.Text, required=True)
    llm = graph.role("llm", Counted, init=init, replicas=2, balance=balance)
    answer = llm.interface("ask", inputs=[[question]], outputs=[omni_flow.stream("token", int), "counts"])
    graph.output(token=answer.token, counts=answer.counts)
    return graph


def ask(app: Any, question: str) -> tuple[float, int, int]:
    """Milliseconds to the first token, tokens of the prompt, tokens of it found."""
    begun = time.perf_counter()
    first, counts = 0.0, [0, 0]
    for name, value in app.submit(question=question):
        if name == "token" and not first:
            first = (time.perf_counter() - begun) * 1e3
        elif name == "counts":
            counts = value
    return first, counts[0], counts[1]


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All rounds."""
    draw = random.Random(7)
    prefixes = ["".join(draw.choices("abcdefgh ", k=options.length)) for _ in range(options.prefixes)]
    quota = (options.prefixes * options.length // 2 - 2 * LOT * PAGE + options.length) // PAGE * PAGE
    init = {
        "model": folder,
        "template": TEMPLATE,
        "engine": {"device": "cpu", "max_tokens": quota},
        "sampling": {"max_tokens": 4, "ignore_eos": True},
    }
    samples: dict[str, list[tuple[float, int, int]]] = {name: [] for name in STRATEGIES}
    memory = Memory(managers=2, temp_bytes=64 << 20)
    with ExitStack() as stack:
        apps = {
            name: stack.enter_context(omni_flow.launch(graph_of(balance, init), memory=memory))
            for name, balance in STRATEGIES.items()
        }
        for turn in range(options.rounds + 1):
            for prefix in draw.sample(prefixes, len(prefixes)):
                question = f"{prefix} question {turn}"
                for name, app in apps.items():
                    sample = ask(app, question)
                    if turn:
                        samples[name].append(sample)
    result: dict[str, Any] = {}
    for name, rows in samples.items():
        low, median, high = statistics.quantiles([row[0] for row in rows], n=4)
        result[name] = {
            "hit_tokens": sum(row[2] for row in rows),
            "prompt_tokens": sum(row[1] for row in rows),
            "ttft_ms": round(median, 2),
            "ttft_ms_quartiles": [round(low, 2), round(high, 2)],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prefixes", type=int, default=9)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options, options.model or str(tiny_checkpoint("deepseek_v2", scratch)))
    if options.json:
        print(json.dumps(result))
        return
    print(f"{platform.machine()}, python {platform.python_version()}, sglang {version('sglang')}")
    print(f"{options.rounds} rounds, {options.prefixes} prefixes of {options.length} bytes, two replicas, alternating")
    for name, row in result.items():
        low, high = row["ttft_ms_quartiles"]
        share = row["hit_tokens"] / row["prompt_tokens"]
        print(f"{name:12} {share:6.1%} of prompt tokens cached, first token {row['ttft_ms']} ms ({low} to {high})")


if __name__ == "__main__":
    main()
