"""Chat with DeepSeek-V2 or DeepSeek-V2-Lite in one role, token by token.

    export DEEPSEEK_V2=folder/of/the/checkpoint
    omni-flow run examples/deepseek_v2_llm_only --prompt "Why is the sky blue?" --param max_tokens=64

`DEEPSEEK_V2` names a folder in the official layout (config.json, tokenizer.json, *.safetensors). Without the real one,
write a small random one, which talks nonsense but takes the same path:

    python -c 'from omni_flow.testing import tiny_checkpoint; tiny_checkpoint("deepseek_v2", "tiny")'

Where there is a GPU (with SGLang's own install, see `docs/compute.md`) the engine runs on it, in the checkpoint's
bfloat16; else on the CPU, in float32. Fields of `EngineConfig` go before that, and `cache_tokens` and `l2_tokens` of
the role; the first to give is how many tokens of KV the engine may hold at once (31 KB each for V2-Lite on a GPU),
8,192 by default:

    export DEEPSEEK_V2_ENGINE='{"max_tokens": 131072, "max_running": 64}'

Open `graph.py`. Replicas (`--replicas llm=2`) share one KV pool and one copy of the weights; the turns of a session
stay on one replica, which knows its history.
"""
