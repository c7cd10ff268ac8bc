"""Weights held once per node: one process loads a tensor, all others map the same memory read-only.

Open `names.py` first (what a tensor is called), then `catalog.py` (who loads, who holds, which version is current),
`service.py` (the catalog in the memory manager), `client.py` (`WeightClient.get`) and `safetensors.py` (files).
"""
