"""SGLang's out-of-tree platform for a plain CPU (entry point group `sglang.srt.platforms`, name `omni_flow_cpu`).

Selected by `SGLANG_PLATFORM=omni_flow_cpu`, which `shim.prepare_cpu` sets; inert otherwise. SGLang's in-tree CPU
platform needs the kernels of AMX machines; this one runs everything in plain PyTorch.
"""

from __future__ import annotations

import os
from typing import Any

from omni_flow.compute.sglang.shim import PLATFORM


def activate() -> str | None:
    """Entry point: the class to use, None where this platform was not chosen."""
    return f"{__name__}.CpuPlatform" if os.environ.get("SGLANG_PLATFORM") == PLATFORM else None


def _platform() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """A CPU without kernels of its own."""

        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            kind: type = MHATokenToKVPool
            return kind

        def get_mla_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

            class CpuMlaPool(MLATokenToKVPool):  # type: ignore[misc]
                """0.5.17 passes out-of-tree MLA pools an argument that only DSA pools have."""

                def __init__(self, *args: Any, index_head_dim: int | None = None, **more: Any) -> None:
                    super().__init__(*args, **more)

            return CpuMlaPool

        def get_paged_allocator_cls(self) -> type:
            from omni_flow.compute.sglang.allocator import allocator_class

            return allocator_class()

    return CpuPlatform


def __getattr__(name: str) -> object:
    if name != "CpuPlatform":
        raise AttributeError(name)
    globals()[name] = made = _platform()
    return made
