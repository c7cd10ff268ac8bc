"""Schedules: everything that may vary between two runs of one request, drawn from a seed.

A schedule says how many shares each role has, how much credit creators have, how long each message and each activation
takes, what is duplicated, which interfaces run in batches, which share dies when, and whether the request is cancelled
or meets its deadline. Moments
are counted in steps (events handled), so that they fall within the run whatever the delays are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from omni_flow.control.credit import UNBOUNDED

Order = Literal["exponential", "heavy", "channels", "lifo", "fifo"]
ORDERS: tuple[Order, ...] = ("exponential", "heavy", "channels", "lifo", "fifo")


@dataclass(frozen=True, slots=True)
class Death:
    """The replica that hosts share `share` of `role` dies at `step`."""

    step: int
    role: str
    share: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The request is cancelled, or its deadline passes, at `step`."""

    step: int
    how: Literal["cancel", "deadline"]


@dataclass(frozen=True, slots=True)
class Faults:
    """What schedules may contain, and what is pinned (`shares`, `credit`: None is 1 to 3, drawn).

    `deaths` are those of roles whose interfaces all declare retries; `losses` those of any other role.
    """

    duplicates: bool = True
    deaths: bool = True
    losses: bool = True
    stops: bool = True
    shares: int | None = None
    credit: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule. `drain`: the request is left to run out before `close` is delivered.

    `credit` is W in numbers, `credit_bytes` W in bytes; the simulator says that a frame has 0 to 9 bytes. `batches`:
    interface → how many activations one call takes at most; how long the first waits is a delay like any other.
    """

    seed: int
    shares: Mapping[str, int]
    credit: int
    order: Order
    credit_bytes: int = UNBOUNDED
    duplicates: float = 0.0
    slow: str | None = None
    deaths: Sequence[Death] = ()
    stop: Stop | None = None
    drain: bool = True
    lossy: bool = False
    batches: Mapping[str, int] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether the result must equal the reference's; else it must be a prefix of it."""
        return self.stop is None and not self.lossy


def random_schedule(
    seed: int, roles: Mapping[str, int], steps: int, faults: Faults, batchable: Sequence[str] = ()
) -> Schedule:
    """A random schedule.

    Args:
        roles: role → how many deaths each of its shares must survive (0: an interface of it declares no retries).
        steps: about how many events a run has; deaths and stops fall into them.
        batchable: interfaces that may run in batches.
    """
    rng = Random(seed)
    shares = {role: faults.shares or rng.randint(1, 3) for role in roles}
    deaths: list[Death] = []
    stop: Stop | None = None
    lossy = False
    what = rng.random()
    if what < 0.3 and faults.deaths:
        for _ in range(rng.randint(1, 3)):
            mortal = [role for role, most in roles.items() if sum(death.role == role for death in deaths) < most]
            if mortal:
                role = rng.choice(mortal)
                deaths.append(Death(rng.randrange(steps), role, rng.randrange(shares[role])))
    elif what < 0.4 and faults.losses:
        fragile = [role for role, most in roles.items() if most == 0]
        if fragile:
            role = rng.choice(fragile)
            deaths.append(Death(rng.randrange(steps), role, rng.randrange(shares[role])))
            lossy = True
    elif what < 0.55 and faults.stops:
        stop = Stop(rng.randrange(steps), rng.choice(("cancel", "deadline")))
    return Schedule(
        seed=seed,
        shares=shares,
        credit=faults.credit or rng.randint(1, 3),
        order=rng.choice(ORDERS),
        credit_bytes=rng.choice((1, 5, 20, UNBOUNDED, UNBOUNDED)),
        duplicates=rng.choice((0.0, 0.1, 0.3, 0.5)) if faults.duplicates else 0.0,
        slow=rng.choice(list(roles)) if roles and rng.random() < 0.2 else None,
        deaths=deaths,
        stop=stop,
        drain=rng.random() < 0.5,
        lossy=lossy,
        batches={name: rng.randint(1, 4) for name in batchable if rng.random() < 0.5},
    )


def delays(schedule: Schedule, rng: Random) -> Callable[[object], float]:
    """How long the next message on a channel takes; a channel is any hashable thing.

    Under "lifo" and "fifo" delays are all equal: the simulator orders by age instead.
    """
    if schedule.order == "exponential":
        return lambda channel: rng.expovariate(1.0)
    if schedule.order == "heavy":
        return lambda channel: rng.paretovariate(0.6)
    if schedule.order == "channels":
        speed: dict[object, float] = {}

        def by_channel(channel: object) -> float:
            factor = speed.get(channel)
            if factor is None:
                factor = speed[channel] = 10.0 ** rng.uniform(0, 6)
            return factor * rng.random()

        return by_channel
    return lambda channel: 0.0
