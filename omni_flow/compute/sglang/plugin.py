"""The plugin (entry point `sglang.srt.plugins`): one function that puts every hook in, one that sees that they hold.

It does nothing in a process that has no `Takeover`, so plain SGLang runs beside it in the same environment.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from omni_flow.compute.errors import HookFailed, KernelMissing
from omni_flow.compute.sglang import (
    allocator,
    batch_sampling,
    buffers,
    cache,
    cpu_fixes,
    fixed_rows,
    shared_weights,
    step_hook,
    tail_graph,
    takeover,
)

VERSION: Final = "0.5.17"
OUTPUT: Final = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
SAMPLER: Final = "pytorch"
PREFILL_GRAPHS: Final = "DeepseekV2ForCausalLM"
PREFILL_MODELS: Final = "sglang.srt.configs.model_config.mla_breakable_cuda_graph_supported_model_archs"


def hooks() -> list[tuple[str, str, Callable[..., Any]]]:
    """Every hook of this process: (target, kind, function)."""
    kv = "sglang.srt.mem_cache."
    table: list[tuple[str, str, Callable[..., Any]]] = [
        (kv + "memory_pool.MHATokenToKVPool._create_buffers_normal", "REPLACE", buffers.mha_buffers),
        (kv + "memory_pool.MLATokenToKVPool._create_buffers", "REPLACE", buffers.mla_buffers),
        (kv + "kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", "AROUND", buffers.profile_bytes),
        (kv + "allocation.alloc_for_extend", "BEFORE", allocator.remember_batch),
        (kv + "allocation.alloc_for_decode", "BEFORE", allocator.remember_batch),
        ("sglang.srt.model_loader.loader.get_model_loader", "AROUND", shared_weights.wrap_loader),
        (OUTPUT + ".stream_output", "BEFORE", cache.begin_sealing),
        ("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", "AFTER", fixed_rows.wait_for_rows),
        *batch_sampling.hooks(),
    ]
    if takeover.current().step_hook:
        table += step_hook.hooks()
    if takeover.current().cpu:
        table += cpu_fixes.hooks()
    else:
        table += tail_graph.hooks() if takeover.current().tail_graph else []
        table.append((kv + "allocator.paged.PagedTokenToKVPoolAllocator", "REPLACE", allocator.allocator_class()))
    return table


def check_versions() -> None:
    """
    Raises:
        KernelMissing: sglang is not there, or not the version whose inside this plugin knows.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise KernelMissing("sglang is not installed", f"pip install sglang=={VERSION}") from None
    if found != VERSION:
        raise KernelMissing(f"sglang {found} is installed", f"this build takes over {VERSION} and no other")


def register() -> None:
    """Entry point: called by SGLang's `load_plugins` in every process of SGLang."""
    if not takeover.active():
        return
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_versions()
    for target, kind, function in hooks():
        HookRegistry.register(target, function, HookType[kind])
    register_radix_cache_backend(cache.BACKEND, cache.make_cache)
    register_sampler_backend(SAMPLER, batch_sampling.make_sampler)
    if takeover.current().cpu:
        cpu_fixes.register()
    else:
        allow_prefill_graphs()


def allow_prefill_graphs() -> None:
    """Let DeepSeek-V2 replay captured prefills over a cached prefix. SGLang lists the models that keep to absorbed
    attention while a prefill is captured; over its triton attention DeepSeek-V2 does and is not on the list."""
    listed = pkgutil.resolve_name(PREFILL_MODELS)
    if PREFILL_GRAPHS not in listed:
        listed.append(PREFILL_GRAPHS)


def entries() -> list[tuple[str, Callable[[Any], bool]]]:
    """What `register` enters in tables of SGLang beside hooks, where no part that has started would show that it is
    missing: (target, whether it is there)."""
    if takeover.current().cpu:
        return [(cpu_fixes.HANDLERS, lambda table: table.get_handler(cpu_fixes.ATTENTION) is cpu_fixes.absorbed)]
    return [(PREFILL_MODELS, lambda listed: PREFILL_GRAPHS in listed)]


def leads_to(found: Any, function: Callable[..., Any]) -> bool:
    """Whether `found` is `function`, or a wrapper that calls it."""
    while found is not None:
        cells = getattr(found, "__closure__", None) or ()
        if found is function or any(cell.cell_contents is function for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def in_force(target: str, holds: Callable[[Any], bool]) -> bool:
    """Whether SGLang has something under `target`, and `holds` is true of it."""
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return holds(found)


def verify_hooks() -> None:
    """See that every hook and entry is in force; SGLang itself only logs what it could not put in.

    Raises:
        HookFailed: names those that are not.
    """
    wanted = entries()
    wanted += [(target, partial(leads_to, function=function)) for target, _, function in hooks()]
    missing = sorted(target for target, holds in wanted if not in_force(target, holds))
    if missing:
        raise HookFailed(f"SGLang did not take these hooks: {', '.join(missing)}", f"is this sglang {VERSION}?")


def verify(scheduler: Any) -> None:
    """See that a scheduler that has started has our parts.

    Raises:
        HookFailed: names what it has not.
    """
    runner = scheduler.tp_worker.model_runner
    found = {
        "prefix cache": (scheduler.tree_cache, "OmniCache"),
        "allocator": (scheduler.token_to_kv_pool_allocator, "OmniAllocator"),
        "sampler": (runner.sampler, "OmniSampler"),
    }
    if takeover.current().cpu:
        found["attention"] = (runner.attn_backend, "CpuAttention")
    for name, (thing, kind) in found.items():
        if type(thing).__name__ != kind:
            raise HookFailed(f"SGLang's {name} is {type(thing).__name__}, not {kind}", "see omni-flow doctor")
    mine = takeover.current()
    if mine.step_hook and mine.steps is None:
        raise HookFailed(f"SGLang has not made the step hook {mine.step_hook}", "see omni-flow doctor")
    arena = mine.arena
    if arena is not None:
        pool = runner.token_to_kv_pool
        first = (pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer)[0]
        if first.untyped_storage().data_ptr() != arena().untyped_storage().data_ptr():
            raise HookFailed("SGLang's KV buffers are not in the arena", "see omni-flow doctor")
