"""How a forward pass runs: the engine seam, the SGLang kernel behind it, prefix matching and sampling.

Open `engine.py` first: what a role asks of an engine and what it gets. `sglang/` holds the one kernel there is,
`prefix.py` where a cached prefix may end, `sampling.py` and `sampler.py` how a token is chosen. Only `sampler.py`
imports torch at module import, and nothing imports sglang.
"""
