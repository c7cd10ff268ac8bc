"""Chat with DeepSeek-V2 or DeepSeek-V2-Lite in one role, token by token.

    export DEEPSEEK_V2=folder/of/the/checkpoint
    omni-flow run examples/deepseek_v2_llm_only --prompt "Why is the sky blue?" --param max_tokens=64

`DEEPSEEK_V2` names a folder in the official layout (config.json, tokenizer.json, *.safetensors). Without the real one,
write a small random one, which talks nonsense but takes the same path:

    python -c 'from omni_flow.testing import tiny_checkpoint; tiny_checkpoint("deepseek_v2", "tiny")'

Open `graph.py`. Replicas (`--replicas llm=2`) share one KV pool and one copy of the weights; the turns of a session
stay on one replica, which knows its history.
"""
