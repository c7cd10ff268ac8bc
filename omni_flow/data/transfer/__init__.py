"""Bytes between nodes: KV objects pulled and pushed between memory managers, and the drivers that move them.

Open `client.py` first (what a role asks for), then `node.py` (the transfer process of a node), `base.py` (the seam of
drivers) and `tcp.py` (the driver that is always there). `docs/transfer.md` tells the whole way of a pull.
"""
