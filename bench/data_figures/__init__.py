"""The figures of `bench/data_plane.py`, one topic a module. A module has `measure(bench)` and names its keys in its
docstring.
"""
