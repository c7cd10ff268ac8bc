"""What a bench under --json leaves on stdout: one JSON object of plain numbers, and nothing else."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import TextIO


def keep_stdout() -> TextIO:
    """The stdout of now, for the answer alone: what this process prints from here on, and every process that it starts,
    goes to stderr."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def plain_numbers(figures: Mapping[str, float]) -> str:
    """One JSON object. A figure that is no finite number is left out, and named on stderr."""
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    for name in figures.keys() - finite.keys():
        print(f"{name} is left out, it is {figures[name]}", file=sys.stderr)
    return json.dumps(finite, allow_nan=False)
