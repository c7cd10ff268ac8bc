"""SessionLoadBalance: which replicas a request's shares are pinned to, role by role, at admission. Pure.

Each strategy orders the replicas of a role; the order is the list of shares. Activations under streams spread over the
whole list, an activation outside any stream runs on the first. A stateful role gets a list of one. Strategies look at
what the gateway knows: its own live requests per replica, and the session.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

import xxhash


class Balancer(ABC):
    """Orders replica ids for one request of one role."""

    @abstractmethod
    def order(self, replicas: Sequence[str], load: Mapping[str, int], session: str | None) -> list[str]:
        """`replicas`: ids that take new requests, sorted, at least one. `load[id]`: live requests placed there."""


class RoundRobin(Balancer):
    """Each request begins one replica further."""

    def __init__(self) -> None:
        self._turn = 0

    def order(self, replicas: Sequence[str], load: Mapping[str, int], session: str | None) -> list[str]:
        first = self._turn % len(replicas)
        self._turn += 1
        return [*replicas[first:], *replicas[:first]]


class Random(Balancer):
    """A random order, from a generator of its own."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def order(self, replicas: Sequence[str], load: Mapping[str, int], session: str | None) -> list[str]:
        return self._random.sample(replicas, len(replicas))


class LeastLoaded(Balancer):
    """Fewest live requests first; equals take turns, so that a burst before any load shows still spreads."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def order(self, replicas: Sequence[str], load: Mapping[str, int], session: str | None) -> list[str]:
        turned = self._turns.order(replicas, load, session)
        return sorted(turned, key=lambda r: load.get(r, 0))


class Rendezvous(Balancer):
    """A session keeps its order while its replicas live (highest random weight hashing): when one goes, only its
    sessions move. Requests without a session go to the least loaded."""

    def __init__(self) -> None:
        self._other = LeastLoaded()

    def order(self, replicas: Sequence[str], load: Mapping[str, int], session: str | None) -> list[str]:
        if session is None:
            return self._other.order(replicas, load, session)
        return sorted(
            replicas, key=lambda r: xxhash.xxh3_64_intdigest(f"{session}\0{_place(r)}".encode()), reverse=True
        )


class Weighted(Balancer):
    """Load divided by weight, lowest first. Weights are by place (`tts/0`); a replica without one has weight 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._turns = RoundRobin()
        if any(weight <= 0 for weight in self._weights.values()):
            raise ValueError(f"weights must be positive, got {self._weights}")

    def order(self, replicas: Sequence[str], load: Mapping[str, int], session: str | None) -> list[str]:
        turned = self._turns.order(replicas, load, session)
        return sorted(turned, key=lambda r: (load.get(r, 0) + 1) / self._weights.get(_place(r), 1.0))


STRATEGIES: Final[Mapping[str, type[Balancer]]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "session": Rendezvous,
    "weighted": Weighted,
}


def make_balancer(name: str) -> Balancer:
    """The strategy of that name. Raises ValueError naming the known ones."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown balance {name!r}; known are {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name]()


def _place(replica: str) -> str:
    """A replica id without its epoch: a restarted replica keeps its place."""
    return replica.rsplit("@", 1)[0]
