"""Media from callers: fetched only from where it may be, decoded in processes of their own, within limits.

Open `service.py` first. `worker.py` is the program of a decoding process, `pool.py` keeps those, `fetch.py` fetches.
"""
