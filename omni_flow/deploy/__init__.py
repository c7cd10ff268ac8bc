"""Deployment: bringing the replicas of a graph up as processes, keeping them up, and telling everybody who lives.

Open `local.py` first (`launch`, `alaunch`), then `launchers.py` (what they hold), `supervisor.py` (the places and their
replicas), `nursery.py` (the process that forks workers), `worker.py` (the process of one replica). Pure parts:
`registry.py` (who lives) and `places.py` (when a dead one is started again).
"""
