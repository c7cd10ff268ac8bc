"""Control flow: what runs when. Open `spec.py` first, then `compile.py` and `share.py`."""
