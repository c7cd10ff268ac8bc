"""The plugin of `compute.py` for SGLang, in plain SGLang and in ours alike (entry point `sglang.srt.plugins`).

SGLang's dummy weights lie within 0.001 of zero, so its tokens would hardly depend on what is in the KV: here they have
the magnitudes of a trained network, seeded by name. And DeepSeek-V2 is put on SGLang's list of models that may use
prefill graphs ("breakable"), as our own plugin does for the engines it runs in.
"""

from __future__ import annotations

import zlib
from typing import Any


def seeded_weights(model: Any, low: float = 0.0, high: float = 0.0, seed: int = 0) -> None:
    """Replaces `initialize_dummy_weights`: norms are 1, everything else is normal with deviation 0.03."""
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor) or name.endswith("cos_sin_cache"):
            continue
        if "norm" in name:
            tensor.fill_(1.0)
            continue
        generator = torch.Generator(device=tensor.device)
        generator.manual_seed(zlib.crc32(name.encode()))
        for part in tensor if tensor.dim() == 3 else [tensor]:
            part.normal_(0, 0.03, generator=generator)


def register() -> None:
    """Entry point."""
    from sglang.srt.configs import model_config
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
    HookRegistry.register(target, seeded_weights, HookType.REPLACE)
    listed = model_config.mla_breakable_cuda_graph_supported_model_archs
    if "DeepseekV2ForCausalLM" not in listed:
        listed.append("DeepseekV2ForCausalLM")
