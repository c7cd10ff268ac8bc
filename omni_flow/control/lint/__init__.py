"""Findings about a graph beyond its scopes: names, reachability, role classes, types, and notes.

Each module is pure and gives findings for one concern; `roles.py` is the one to open first. The rules about scopes,
loops, joins and windows are in `control/rules.py`; `Graph.lint()` runs all of them.
"""
