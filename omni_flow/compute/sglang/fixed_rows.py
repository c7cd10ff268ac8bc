"""Fixed-row forwards: rows given as embeddings, whose KV is written over at the same places again and again.

A denoise step is such a forward. Its rows see all cached KV before them and, where their flag says so, each other in
both directions.
"""

from __future__ import annotations

from typing import Any


def causal_flags(forward_batch: Any) -> list[bool] | None:
    """One flag per new row of a marked batch, None for an ordinary one."""
    flags: list[bool] | None = getattr(forward_batch, "omni_causal", None)
    return flags
