"""The engine on one GPU against plain SGLang 0.5.17: `python bench/gpu/compute.py [--json] [--pairs N] [--steps A,B]`.

DeepSeek-V2-Lite at full size with seeded random weights, bf16, pages of 64 tokens. Plain SGLang's `Engine`, one engine
of ours (A) and a second one (B) live on the card at once, A and B over one KV pool of a memory manager; requests
alternate between plain and A, with the same flags, each after 10 ms in which the device is idle. The processes of the
engines that a figure is not of are stopped (SIGSTOP) meanwhile, plain and ours alike (those of pd_* are of A and B): a
scheduler that looks for work without sleeping, as plain's always does, takes half a core from who shares it, and a
guest is not told which of its processors do. --others run lets them run, and so do the figures named _beside. --json
prints one object with plain numbers on stdout and nothing else, --out keeps every sample. A step that fails costs its
own figures alone, is told on stderr, and makes the exit status 1. Without --json the steps of the median first token
follow, of 512 new tokens (cold) and where a prompt was found in L1 (l1), in L1 but not pinned (pool), in L2 (l2) and in
L3 (l3).

A figure is the median of its samples, one a pair, unless another number of them (with 20 pairs) stands in brackets.

equal_tokens           share of cold prompts (11; around and off page borders, 65 to 20,000 tokens) whose 48 greedy
                       tokens are plain SGLang's; equal_tokens_cached: the same prompts again, now cached;
                       sglang_self_equal: share of plain SGLang's own cached answers that are its cold ones
prefill_N, decode_N    throughput of N prompts of 512 tokens (N new ones; 64 or 256 tokens each), ours over plain;
                       decode_tokens_per_s_N: ours; equal_tokens_N: share of equal answers (a batch that forms otherwise
                       rounds otherwise)
ttft_l1_ratio          answer of one token to a 32,768-token prompt found whole in L1, over plain SGLang's to its own
                       radix hit; ttft_l1_ms: ours; recompute_ms: ours to a prompt that is new (3)
tail_extend_ms         first token of a prompt of which all but 64 tokens are cached; sglang_tail_extend_ms: plain's
pd_extra_ms, pd_gap_ms A prefills and emits the first token, B goes on: first token against A's own, first to second;
                       pd_computed_tokens: how many of the prompt that B was given it computed; pd_equal_tokens: share
                       of second tokens that A decodes as well; pd_equal_to_own: that A gives for the prompt that B was
                       given, with as much of it cached
turns_ratio            first token of turn 10 over turn 1 (5): 512 new prompt tokens and 256 answer tokens a turn;
                       turns_ratio_recomputed: where none of turn 10 is cached
ttft_l2_ratio, ttft_l3_ratio   first token of a 32,768-token prompt that lies in L2 (8; in L3 on the disk of --ssd: 3)
                       alone, over ttft_l1_streamed_ms and the time its bytes take at what the tier was measured to give
                       in this run: l2_gb_per_s of a pinned copy to the device (7), l3_gb_per_s of reads past the page
                       cache by four threads (5). ttft_l1_streamed_ms: of one in L1, measured as they are, as a stream
                       with its timeline (5). ttft_l2_over_recompute: ttft_l2_ms over recompute_ms
fetch_l2_ms            the pages of such a prompt from L2 to L1, asked of the memory manager by the bench (3);
                       ttft_pool_ms: its first token then, when they are in L1 and no engine has pinned them (3)
second_role_gib        device memory that B took at its start (1); second_role_weight_bytes: how many bytes of weights
                       more the memory manager held then (1), 0 where B maps A's

--tiny runs every step on a CPU with a tiny model, an engine of ours without a memory manager in place of plain SGLang
and all lengths divided by 64: it shows that the script works, its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, TextIO

from answer import keep_stdout, plain_numbers
from compute_engines import CONTEXT, PAGE, QUOTA, Plain, PlainEngine
from compute_figures import TINY, VOCABULARY, Figures

ROOT = Path(__file__).parent.parent.parent
L2_PAGES, STAGING = 1024, 256
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": VOCABULARY,
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 100000, "eos_token_id": 100001,
    "tie_word_embeddings": False,
}  # fmt: skip
FLAGS: dict[str, Any] = {
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
    "chunked_prefill_size": 8192,
    "mem_fraction_static": 0.85,
}
PREFILL_GRAPHS: dict[str, dict[str, Any]] = {
    "breakable": {
        "cuda_graph_backend_prefill": "breakable",
        "cuda_graph_bs_prefill": [16, 32, 64, 128, 256, 512, 576],
    },
    "off": {"disable_prefill_cuda_graph": True},
}


def metadata_folder(folder: Path) -> None:
    """Let SGLang find the bench's plugin, and ours where the project is on the path and not installed."""
    plugins = [("omni_bench", "compute_plugin:register")]
    if "omni_flow" not in entry_points(group="sglang.srt.plugins").names:
        plugins.append(("omni_flow", "omni_flow.compute.sglang.plugin:register"))
    for name, target in plugins:
        info = folder / f"{name}_metadata-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-metadata\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
    sys.path.insert(0, str(folder))
    sys.path.insert(0, str(Path(__file__).parent))


def used_gib(tiny: bool) -> float:
    """GiB in use on the device, all processes; 0 without one."""
    if tiny:
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024


def engine_config(folder: Path, options: argparse.Namespace, flags: dict[str, Any], **where: Any) -> Any:
    """Of an engine of ours."""
    from omni_flow.compute.sglang.config import EngineConfig

    if options.tiny:
        return EngineConfig(
            model=str(folder), device="cpu", page_size=PAGE // 16, max_tokens=256 * PAGE // 16, max_running=64,
            context=CONTEXT // TINY, chunk=8192 // TINY, **where,
        )  # fmt: skip
    return EngineConfig(
        model=str(folder), device="cuda", dtype="bfloat16", max_tokens=QUOTA, page_size=PAGE, max_running=64,
        context=CONTEXT, chunk=8192, threads=0, overlap=True, revision="bench", load_format="dummy",
        tail_graph=not options.no_tail_graph, share_weights=not options.own_weights, extra=flags, **where,
    )  # fmt: skip


def memory_manager(folder: Path, work: Path, ssd: Path, tiny: bool) -> tuple[Any, int]:
    """A memory manager with three tiers; returns its process and the bytes of a page."""
    from omni_flow.compute.kv_layout import kv_layout
    from omni_flow.data.launch import start
    from omni_flow.data.pool_spec import PoolSpec
    from omni_flow.data.server_config import ServerConfig

    layout = kv_layout(json.loads((folder / "config.json").read_text()))
    page_bytes = layout.page_bytes(PAGE // 16, "float32") if tiny else layout.page_bytes(PAGE, "bfloat16")
    quota = 256 if tiny else QUOTA // PAGE
    l3_pages = (
        64 if tiny else 4
    ) * quota  # a full disk takes no more: every prompt that sinks leaves hundreds of pages
    place: dict[str, Any] = {} if tiny else {"l1_device": 0, "planes": 27}
    pool = PoolSpec(
        name="kv", page_bytes=page_bytes, l1_pages=2 * (quota + 64) + STAGING + 65,
        l2_pages=quota if tiny else L2_PAGES, l3_pages=l3_pages, padding=1,
        policy="lru",  # the default would keep a prompt that was read often
        **place,
    )  # fmt: skip
    copier = "omni_flow.data.mover" if tiny else "omni_flow.data.cuda_mover"
    cap = l3_pages * (page_bytes + 8192) + (1 << 30)
    movers = (
        ("{python}", "-m", copier, "{path}"),
        ("{python}", "-m", "omni_flow.data.ssd.mover", "{path}", str(ssd / "l3"), str(cap)),
    )
    path = str(work / "memory.sock")
    return start(ServerConfig(path=path, pools=(pool,), huge=False, movers=movers)), page_bytes


async def measure(options: argparse.Namespace, work: Path, say: Callable[[str], None], out: TextIO) -> int:
    """Everything, in the order in which it matters most. Returns the exit status: 1 where something failed, which is
    told. What there is then is printed all the same, and before the engines end: who stops this run may not wait."""
    from omni_flow.compute.sglang.config import attention_backend
    from omni_flow.compute.sglang.kernel import SGLangEngine

    flags = FLAGS | PREFILL_GRAPHS[options.prefill_graphs]
    if not options.tiny:
        flags |= {"attention_backend": options.attention or attention_backend()}
    folder, ssd = work / "model", Path(options.ssd or work)
    if options.tiny:
        from omni_flow.testing import tiny_checkpoint

        tiny_checkpoint("deepseek_v2", folder)
    else:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
    manager, page_bytes = memory_manager(folder, work, ssd, options.tiny)
    config = engine_config(folder, options, flags, manager=str(work / "memory.sock"), pool="kv")
    plain: Plain | PlainEngine
    if options.tiny:
        plain = PlainEngine(engine_config(folder, options, flags))
    else:
        plain = Plain(str(folder), flags)
    a, b = SGLangEngine(config), SGLangEngine(config)
    figures = Figures(plain, a, b, options)
    try:
        await run_steps(figures, options, say, config, page_bytes, ssd)
    except Exception:
        figures.failed.append("start")
        say(f"the engines did not start: {traceback.format_exc()}")
    finally:
        if figures.failed:
            say(f"these steps failed, or there was no time for them: {', '.join(figures.failed)}")
        report(figures, options.json, out)
        figures.only("plain", "a", "b")
        await asyncio.gather(plain.close(), a.close(), b.close(), return_exceptions=True)
        manager.terminate()
        manager.wait(20)
    return int(bool(figures.failed))


async def run_steps(
    figures: Figures, options: argparse.Namespace, say: Callable[[str], None], config: Any, page_bytes: int, ssd: Path
) -> None:
    """Start the engines, and measure. A step that fails is told, and the next one runs.

    Args:
        config: of the engines of ours.
        page_bytes: of a KV page.
        ssd: folder of L3.
    """
    from omni_flow.compute.prefix import PageChain
    from omni_flow.compute.sglang.worker import namespace_of
    from omni_flow.data.client import MemoryManagerClient

    begin = time.perf_counter()
    root = namespace_of(config).root()

    def keys_of(prompt: list[int]) -> list[Any]:
        return PageChain(root).upto(prompt, len(prompt) - 1, config.page_size)

    async def tiers() -> None:
        with MemoryManagerClient(config.manager, name="bench") as client:
            await figures.tiers(client, keys_of, page_bytes, ssd)

    await figures.a.start()
    say(f"A up after {time.perf_counter() - begin:.0f} s, {used_gib(options.tiny):.1f} GiB")
    await figures.plain.start()
    before = used_gib(options.tiny)
    say(f"plain up after {time.perf_counter() - begin:.0f} s, {before:.1f} GiB")
    with MemoryManagerClient(config.manager, name="bench") as client:
        held = client.stats()["weight_bytes"]
        await figures.b.start()
        loaded = client.stats()["weight_bytes"] - held
    figures.out["second_role_gib"] = used_gib(options.tiny) - before
    if loaded or (await figures.b.stats())["weights_mapped"]:  # else they are its own, which nobody counts
        figures.out["second_role_weight_bytes"] = loaded
    say(f"B up after {time.perf_counter() - begin:.0f} s, {used_gib(options.tiny):.1f} GiB")
    steps = {
        "warm": figures.warm,
        "equality": figures.equality,
        "cached": figures.cached,
        "roles": figures.roles,
        "1": lambda: figures.throughput(1, 256),
        "16": lambda: figures.throughput(16, 64),
        "64": lambda: figures.throughput(64, 64),
        "turns": figures.turns,
        "tiers": tiers,
        "beside": figures.beside,
    }
    for name in options.steps.split(",") if options.steps else steps:
        if time.perf_counter() - begin > options.seconds:
            figures.failed.append(name)
            continue
        try:
            await steps[name]()
        except Exception:
            figures.failed.append(name)
            say(f"{name} failed: {traceback.format_exc()}")
        say(f"{name} done after {time.perf_counter() - begin:.0f} s: {json.dumps(figures.out)}")
        figures.keep()


def report(figures: Figures, as_json: bool, out: TextIO) -> None:
    """Print what was measured."""
    if as_json:
        print(plain_numbers(figures.out), file=out, flush=True)
        return
    print(f"{platform.platform()}, Python {platform.python_version()}, sglang {version('sglang')}", file=out)
    for name, value in figures.out.items():
        print(f"{name:32} {value:.4g}", file=out)
    if figures.steps:
        print(figures.table(), file=out)
    out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", help="write figures and samples here as they come")
    parser.add_argument("--seconds", type=float, default=1400.0, help="no step begins later than this")
    parser.add_argument("--steps", help="only these, in this order, comma between")
    parser.add_argument("--tiny", action="store_true", help="on a CPU with a tiny model: whether the script works")
    parser.add_argument("--ssd", help="folder on the disk of L3; default: of temporary files")
    parser.add_argument("--others", choices=("stop", "run"), default="stop", help="what engines do that are not asked")
    parser.add_argument("--no-tail-graph", action="store_true", help="short extends as SGLang runs them")
    parser.add_argument("--own-weights", action="store_true", help="every engine of ours loads its own")
    parser.add_argument("--attention", help="SGLang's, of all engines; default: what ours choose by themselves")
    parser.add_argument("--prefill-graphs", choices=sorted(PREFILL_GRAPHS), default="breakable")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    out = keep_stdout()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # engines that are stopped would stay
    with tempfile.TemporaryDirectory() as work:
        metadata = Path(work) / "metadata"
        metadata.mkdir()
        if not options.tiny:
            metadata_folder(metadata)
            os.environ["SGLANG_PLUGINS"] = "omni_bench"
        status = asyncio.run(measure(options, Path(work), say, out))
    sys.exit(status)


if __name__ == "__main__":
    main()
