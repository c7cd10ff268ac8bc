"""The runtime around the pure core: one event loop per replica, messages straight from replica to replica.

Open `node.py` first (a process's mouth and ears), then `replica.py` (a role instance and its shares), `execution.py`
(how a method is called), `gateway.py` (admission and outcome) and `client.py` (what users hold).
"""
