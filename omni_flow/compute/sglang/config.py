"""What an engine process is told at its start."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_flow.compute.checkpoint import read_config
from omni_flow.compute.errors import BadRequest
from omni_flow.compute.kv_layout import DTYPE_BYTES
from omni_flow.compute.sglang.device import device_of_engines, has_flash_attention_3
from omni_flow.data import cuda

log = logging.getLogger("omni_flow.compute")
AUTO: Final = "auto"
_HOPPER: Final = 9
_FA3: Final = "fa3"
TRITON: Final = "triton"
CPU_FORWARD_S: Final = 3600.0
"""How long a forward on a CPU may take before the engine counts as hung; on a GPU it is SGLang's five minutes."""
AWAKE_S: Final = 3.0
"""How long an engine on a GPU stays awake without work. Waking it up costs the next prompt 1.3 ms on an H200's host."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine with one model. What follows from the device is decided when the config is made, once: its fields
    have no `auto`, and whoever gets the config (the engine's process) or makes one of the same (the launcher, for the
    pool) on this machine means the same.

    Args:
        model: folder of the checkpoint in its official layout.
        device: `cpu` or `cuda`; `auto`: CUDA where the driver shows a device (CUDA_VISIBLE_DEVICES counts) and PyTorch
            and SGLang's kernels are installed for it.
        dtype: of weights, activations and KV: `float32`, `bfloat16` or `float16`; `auto`: float32 on a CPU, on a GPU
            that of the checkpoint where it has 16 bits, else bfloat16.
        max_tokens: tokens of KV this engine may hold at once (its quota), a multiple of `page_size`, three pages
            at least; the longest prompt has two less.
        page_size: tokens a page, over 1; 0: 64 on a GPU, 16 on a CPU.
        max_running: requests computed at the same time.
        max_waiting: requests that wait beyond that, for their turn or their pages; more are refused. 0: no limit.
        context: longest sequence in tokens; 0: what model and quota allow.
        chunk: prefill in pieces of at most this many tokens; 0: whole.
        threads: CPU threads of the engine process; 0: PyTorch's own choice.
        overlap: prepare the next step on the CPU while the GPU computes; None: on a GPU.
        awake: seconds after its last work in which the engine looks for more without sleeping, at the cost of a core;
            None: 3 on a GPU, 0 on a CPU. Where it is not 0, calls of the memory manager don't sleep at once either.
        revision, weight_version: identity of the weights in page hashes.
        manager, pool: address and pool of the node's memory manager; "" keeps pages in the engine's process.
        session_ttl: seconds that the pages of a session are kept after a turn, with a manager; 0: as any page.
        share_weights: with a manager, hold the weights there once for all engines of equal identity; random weights
            (`dummy`) are shared only where `revision` names them.
        tail_graph: on a GPU under SGLang's attention in Triton, what is left of a prompt after a cache hit replays a
            decode graph where it is short enough; it rounds as decode steps do, not as SGLang's extend. Other
            attention splits a long prefix by itself.
        rows_graph: on a GPU, fixed-row forwards replay a CUDA graph; off, they are launched kernel by kernel.
        rows_at_start: fixed-row forwards of so many rows are captured before the engine is ready, others when they are
            first asked for.
        hidden: keep the hidden state of each step's last position, for requests and step hooks that ask for it.
        step_hook: `module:name` of what makes the step hook; set by the engine.
        load_format: `auto`, or `dummy` for random weights (benchmarks).
        extra: further arguments of SGLang's `ServerArgs`, by name.

    Raises:
        BadRequest, BadCheckpoint: a field is wrong; config.json is no JSON object.
        SystemRefusal: nobody named a device, and the CUDA driver gives no answer.
    """

    model: str
    device: str = AUTO
    dtype: str = AUTO
    max_tokens: int = 8192
    page_size: int = 0
    max_running: int = 16
    max_waiting: int = 1024
    context: int = 0
    chunk: int = 0
    threads: int = 1
    overlap: bool | None = None
    awake: float | None = None
    revision: str = ""
    weight_version: int = 0
    manager: str = ""
    pool: str = ""
    session_ttl: float = 600.0
    share_weights: bool = True
    tail_graph: bool = True
    rows_graph: bool = True
    rows_at_start: tuple[int, ...] = ()
    hidden: bool = False
    step_hook: str = ""
    load_format: str = "auto"
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        self._decide()
        if self.dtype not in DTYPE_BYTES:
            raise BadRequest(f"dtype {self.dtype!r}", f"give one of {', '.join(DTYPE_BYTES)}")
        if self.page_size < 2 or self.max_tokens % self.page_size or self.max_tokens < 3 * self.page_size:
            raise BadRequest(
                f"max_tokens {self.max_tokens} with pages of {self.page_size}",
                "give a page size over 1 and a multiple of it, three pages at least",
            )
        if self.max_waiting < 0:
            raise BadRequest(f"max_waiting {self.max_waiting}", "give a number of requests, or 0 for no limit")
        if any(rows < 1 for rows in self.rows_at_start):
            raise BadRequest(f"rows_at_start {self.rows_at_start}", "give numbers of rows, 1 or more")
        if self.awake is not None and self.awake < 0:
            raise BadRequest(f"awake {self.awake}", "give seconds, 0 or more")
        if self.session_ttl < 0:
            raise BadRequest(f"session_ttl {self.session_ttl}", "give seconds, 0 or more")
        if self.manager and not self.pool:
            raise BadRequest(f"a memory manager at {self.manager} and no pool", "name the pool")

    def _decide(self) -> None:
        decide = functools.partial(msgspec.structs.force_setattr, self)
        if self.device == AUTO:
            decide("device", device_of_engines())
        if self.device not in ("cpu", "cuda"):
            raise BadRequest(f"device {self.device!r}", "give cpu, cuda or auto")
        on_gpu = self.device == "cuda"
        if self.dtype == AUTO:
            decide("dtype", _dtype_on_gpu(self.model) if on_gpu else "float32")
        if self.page_size == 0:
            decide("page_size", 64 if on_gpu else 16)
        if self.overlap is None:
            decide("overlap", on_gpu)

    @property
    def awake_s(self) -> float:
        """`awake`, decided."""
        if self.awake is not None:
            return self.awake
        return 0.0 if self.device == "cpu" else AWAKE_S


def server_arguments(config: EngineConfig) -> dict[str, Any]:
    """Arguments of SGLang's `ServerArgs` that follow from a config. The front of SGLang is never started."""
    has_tokenizer = (Path(config.model) / "tokenizer.json").is_file()
    arguments: dict[str, Any] = {
        "model_path": config.model,
        "device": config.device,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "skip_tokenizer_init": not has_tokenizer,
        "grammar_backend": "xgrammar" if has_tokenizer else "none",
        "sampling_backend": "pytorch",
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "retraction_policy": "priority",
        "radix_cache_backend": "omni_flow",
        "max_total_tokens": config.max_tokens,
        "max_running_requests": config.max_running,
        "max_queued_requests": config.max_waiting or None,
        "page_size": config.page_size,
        "context_length": config.context or None,
        "chunked_prefill_size": config.chunk or -1,
        "disable_overlap_schedule": not config.overlap,
        "stream_interval": 1,
        "log_level": "warning",
        "mem_fraction_static": 0.5,
        "return_hidden_states_mode": "last" if config.hidden else None,
    }
    if config.device == "cpu":
        arguments |= {"attention_backend": "torch_native", "disable_cuda_graph": True}
        arguments["watchdog_timeout"] = CPU_FORWARD_S
    else:
        arguments |= {"moe_runner_backend": "triton"}
        if "attention_backend" not in config.extra:
            arguments["attention_backend"] = attention_backend()
    return arguments | config.extra


def attention_backend() -> str:
    """FlashAttention 3 on Hopper, as SGLang chooses, where its kernels have it; elsewhere Triton's: the arena has been
    run with both."""
    if cuda.compute_capability(0)[0] != _HOPPER:
        return TRITON
    if has_flash_attention_3():
        return _FA3
    log.warning("the installed sgl_kernel has no FlashAttention 3 (flash_ops): attention is Triton's")
    return TRITON


def _dtype_on_gpu(model: str) -> str:
    """That of the checkpoint if it has 16 bits, else bfloat16. A folder without config.json is refused at the start."""
    named = read_config(model) if (Path(model) / "config.json").is_file() else {}
    dtype = named.get("dtype") or named.get("torch_dtype")
    return dtype if dtype in ("bfloat16", "float16") else "bfloat16"
