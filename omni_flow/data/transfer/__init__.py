"""Bytes between nodes: drivers that read and write straight between mapped arenas, each in a process of its own.

Open `base.py` first (the seam: spans, jobs, outcomes, errors), then `host.py` (what a manager uses), `tcp.py` and
`tcp_server.py` (the driver that is always there), `directory.py` (who holds what) and `exchange.py` (pull and push).
"""
