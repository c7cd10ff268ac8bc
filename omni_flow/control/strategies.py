"""Balance strategies with options, for `graph.role(balance=...)`. Those without are named by a string."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Balance:
    """A strategy of `omni_flow.control.runtime.balance` and its options."""

    name: str
    options: Mapping[str, Any]


def cache_aware(*, load_weight: float = 8.0, room: int = 4096) -> Balance:
    """A request goes where least has to be done first: the pieces of its inputs whose KV is missing, and the load.

    Args:
        load_weight: how many pieces (256 bytes of the inputs, about 64 tokens) could be computed in the time that one
            live request takes. Larger: even load counts more; smaller: a cached prefix is worth a longer queue.
        room: pieces that one replica keeps, for as long as only what was sent where is known.

    Raises:
        ValueError: one is not positive.
    """
    if load_weight <= 0 or room < 1:
        raise ValueError(f"load_weight and room must be positive, got {load_weight} and {room}")
    return Balance("cache_aware", {"load_weight": load_weight, "room": room})


def weighted(weights: Mapping[str, float]) -> Balance:
    """The load divided by the weight, lowest first.

    Args:
        weights: by place (`{"tts/0": 2.0}`); a replica that is not named has weight 1.

    Raises:
        ValueError: one is not positive.
    """
    if any(weight <= 0 for weight in weights.values()):
        raise ValueError(f"weights must be positive, got {dict(weights)}")
    return Balance("weighted", {"weights": dict(weights)})
