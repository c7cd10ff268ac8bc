"""DeepSeek-V2 as two roles: one computes prompts, the other makes the tokens; the KV between them is in the pool.

    export DEEPSEEK_V2=folder/of/the/checkpoint
    omni-flow run examples/deepseek_v2_disaggregated --prompt "Why is the sky blue?" \\
        --replicas prefill=2 --replicas decode=3

`prefill.py` computes a prompt, which leaves its KV pages in the memory manager's pool, and sends on the token ids and
the first new token. `decode.py` gives that token out at once and asks its own engine to go on; the engine finds the
pages by their hashes and computes only the tail that fills no page. Nobody sends KV and nobody knows a partner: any
replica of the one role goes with any of the other, and a page that was evicted in between is computed again.

Both engines take `DEEPSEEK_V2_ENGINE`, as JSON: see `examples/deepseek_v2_llm_only`.

The output `reused` says how many tokens of the prompt the decode role found. A tiny checkpoint does, see
`examples/deepseek_v2_llm_only`; greedy answers of the two graphs are equal.
"""
