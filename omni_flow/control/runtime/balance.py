"""SessionLoadBalance: which replicas a request's shares are pinned to, role by role, at admission. Pure.

Each strategy orders the replicas of a role; the order is the list of shares. Activations under streams spread over the
whole list, an activation outside any stream runs on the first. A stateful role gets a list of one. Strategies look at
what the gateway knows: its own live requests per replica, the session, and the pieces of the inputs.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import xxhash

from omni_flow.control.runtime.prefixes import Holders, Key, Routed
from omni_flow.control.spec import RoleSpec


class Balancer(ABC):
    """Orders replica ids for one request of one role."""

    wants_keys: ClassVar[bool] = False
    """Whether it looks at `keys`; nobody computes them for one that does not."""

    @abstractmethod
    def order(
        self, replicas: Sequence[str], load: Mapping[str, int], session: str | None, keys: Sequence[Key] = ()
    ) -> list[str]:
        """`replicas`: ids that take new requests, sorted, at least one. `load[id]`: live requests placed there.

        `keys`: the pieces of the request's inputs, see `prefixes.pieces_of`.
        """


class RoundRobin(Balancer):
    """Each request begins one replica further."""

    def __init__(self) -> None:
        self._turn = 0

    def order(
        self, replicas: Sequence[str], load: Mapping[str, int], session: str | None, keys: Sequence[Key] = ()
    ) -> list[str]:
        first = self._turn % len(replicas)
        self._turn += 1
        return [*replicas[first:], *replicas[:first]]


class Random(Balancer):
    """A random order, from a generator of its own."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def order(
        self, replicas: Sequence[str], load: Mapping[str, int], session: str | None, keys: Sequence[Key] = ()
    ) -> list[str]:
        return self._random.sample(replicas, len(replicas))


class LeastLoaded(Balancer):
    """Fewest live requests first; equals take turns, so that a burst before any load shows still spreads."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def order(
        self, replicas: Sequence[str], load: Mapping[str, int], session: str | None, keys: Sequence[Key] = ()
    ) -> list[str]:
        turned = self._turns.order(replicas, load, session)
        return sorted(turned, key=lambda r: load.get(r, 0))


class Rendezvous(Balancer):
    """A session keeps its order while its replicas live (highest random weight hashing): when one goes, only its
    sessions move. Requests without a session go to the least loaded."""

    def __init__(self) -> None:
        self._other = LeastLoaded()

    def order(
        self, replicas: Sequence[str], load: Mapping[str, int], session: str | None, keys: Sequence[Key] = ()
    ) -> list[str]:
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

    def order(
        self, replicas: Sequence[str], load: Mapping[str, int], session: str | None, keys: Sequence[Key] = ()
    ) -> list[str]:
        turned = self._turns.order(replicas, load, session)
        return sorted(turned, key=lambda r: (load.get(r, 0) + 1) / self._weights.get(_place(r), 1.0))


class CacheAware(Balancer):
    """Where least has to be done first: the pieces of the prompt that a replica does not hold, and its load.

    The cost of a replica is `missing pieces + load * load_weight`: a longer cached prefix is worth a longer
    queue, and a prefix that everybody asks for does not all go to the one who has it. Ties go to the least loaded.

    Args:
        holders: who holds what; by default what was sent where.
        load_weight: how many pieces could be computed in the time that one live request takes.
        room: see `Routed`.
    """

    wants_keys: ClassVar[bool] = True

    def __init__(self, holders: Holders | None = None, load_weight: float = 8.0, room: int = 4096) -> None:
        if load_weight <= 0:
            raise ValueError(f"load_weight must be positive, got {load_weight}")
        self.room = room
        self.holders: Holders = holders if holders is not None else Routed(room)
        self._load_weight = load_weight
        self._least = LeastLoaded()

    def order(
        self, replicas: Sequence[str], load: Mapping[str, int], session: str | None, keys: Sequence[Key] = ()
    ) -> list[str]:
        least = self._least.order(replicas, load, session)
        if not keys:
            return least
        held = self.holders.held(keys, replicas)
        order = sorted(least, key=lambda r: len(keys) - held.get(r, 0) + load.get(r, 0) * self._load_weight)
        self.holders.sent(keys, order[0])
        return order


STRATEGIES: Final[Mapping[str, type[Balancer]]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "session": Rendezvous,
    "weighted": Weighted,
    "cache_aware": CacheAware,
}


def make_balancer(name: str, options: Mapping[str, Any] | None = None) -> Balancer:
    """The strategy of that name with its options. Raises ValueError naming the known ones."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown balance {name!r}; known are {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name](**options or {})


def balancer_of(role: RoleSpec, holders: Callable[[int], Holders] | None = None) -> Balancer:
    """The strategy of a role. `holders`: makes what `cache_aware` goes by, of its room."""
    made = make_balancer(role.balance, role.balance_options)
    if holders is not None and isinstance(made, CacheAware):
        made.holders = holders(made.room)
    return made


def _place(replica: str) -> str:
    """A replica id without its epoch: a restarted replica keeps its place."""
    return replica.rsplit("@", 1)[0]
