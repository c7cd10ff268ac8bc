"""Who takes part in a simulated request: the gateway with its client, and each incarnation of a share.

They are the hosts that the real `Share` and `Request` ask for; what they ask for becomes an event of the `World`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from omni_flow.control.activations import Activations
from omni_flow.control.delivery import Delivered
from omni_flow.control.facts import Failure, Message
from omni_flow.control.host import Activation
from omni_flow.control.ledger import Ledger
from omni_flow.control.plan import Interface, InterfaceId, Path
from omni_flow.control.request import Outcome, Request
from omni_flow.control.share import Share
from omni_flow.testing.facts import Given

if TYPE_CHECKING:
    from omni_flow.testing.world import World

Key = tuple[int, int]
"""(role, share)."""

DELIVER: Final = 0
TO_GATEWAY: Final = 1
RUN: Final = 2
CLOSE: Final = 3
ANNOUNCE: Final = 4
LOST: Final = 5
CONSUMED: Final = 6
CLIENT: Final = 7
BATCH: Final = 8
CALLED: Final = 9


@dataclass(slots=True)
class Observed:
    """What happened in one run. Paths are tuples of numbers; `runs` has how often each activation was started.

    `batched`: activations that shared a call with others. `orphaned`: its gateway died.
    """

    outputs: dict[str, list[Any]] = field(default_factory=dict)
    outcome: str | None = None
    outcomes: int = 0
    failed: frozenset[str] = frozenset()
    runs: dict[tuple[str, Path], list[tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    facts: dict[tuple[int, Path], Any] = field(default_factory=dict)
    ends: dict[tuple[int, Path], tuple[int, bool]] = field(default_factory=dict)
    starts: dict[str, list[Path]] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    steps: int = 0
    deaths: int = 0
    duplicates: int = 0
    batched: int = 0
    lost: bool = False
    stopped: bool = False
    orphaned: bool = False


@dataclass(slots=True)
class Course:
    """Where role code is in an activation: what it gives, and how much it gave."""

    given: Given
    position: int = 0
    parked: bool = False


class Party:
    """Who sends: it logs what it sent, and knows each share's epoch as far as it was told."""

    __slots__ = ("dead", "ledger", "view", "world")

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = Ledger(world.plan)
        self.view = dict(world.epochs)
        self.dead = False

    def send(self, role: int, share: int, message: Message, interfaces: tuple[InterfaceId, ...]) -> None:
        self.ledger.sent(role, share, message, interfaces)
        self.world.note(message)
        self.world.post(self, (role, share), message)

    def decode(self, payload: Any) -> Any:
        return payload


class Seat(Party):
    """One incarnation of a share, and its host."""

    __slots__ = ("closed", "key", "share")

    def __init__(self, world: World, key: Key) -> None:
        super().__init__(world)
        self.key = key
        self.closed = False
        self.share = Share(
            world.plan,
            world.plan.roles[key[0]],
            key[1],
            world.shares,
            world.params,
            self,
            world.schedule.credit,
            world.schedule.credit_bytes,
        )

    def to_gateway(self, message: Message) -> None:
        self.world.note(message)
        self.world.later(TO_GATEWAY, (self.key, -1), self, message, duplicable=True)

    def start(self, share: Activations, activation: Activation) -> None:
        activation.context = Course(self.world.behaviour(activation))
        if activation.interface.name in self.world.schedule.batches:
            self.world.batches.add(self, activation)
        else:
            self.world.later(RUN, ("run", self.key), self, activation, slow=self.world.is_slow(self.key))

    def resume(self, share: Activations, activation: Activation) -> None:
        course: Course = activation.context
        if course.parked:
            course.parked = False
            self.world.later(RUN, ("run", self.key), self, activation)

    def report(self, share: Activations, interface: Interface, path: Path, error: Exception) -> None:
        self.world.seen.contradictions.append(f"{interface.name}: window policy raised {error!r}")


class Desk(Party):
    """The gateway of the request, and its client."""

    __slots__ = ("frames", "request")

    def __init__(self, world: World, inputs: Mapping[str, Any]) -> None:
        super().__init__(world)
        self.request = Request(
            world.plan, world.shares, world.params, self, world.schedule.credit, world.schedule.credit_bytes
        )
        streamed = [p.name for p in world.plan.spec.placeholders if p.stream]
        self.frames = {name: list(inputs.get(name) or ()) for name in streamed if name in world.plan.source_ids}

    def deliver(self, delivered: Delivered) -> None:
        world = self.world
        world.seen.outputs[world.plan.outputs[delivered.output].name].append(delivered.value)
        world.later(CONSUMED, "client", delivered)

    def resume(self, placeholder: str) -> None:
        self.world.later(CLIENT, ("client", placeholder), placeholder)

    def decided(self, outcome: Outcome, failures: Mapping[str, Failure]) -> None:
        seen = self.world.seen
        seen.outcome = outcome.value
        seen.outcomes += 1
        seen.failed = frozenset(failures)
        self.world.outcome_is_known()

    def push(self, placeholder: str) -> None:
        """The client sends one frame, or says that there are no more, if credit allows."""
        left = self.frames[placeholder]
        if self.request.outcome is not None and not self.world.schedule.drain:
            return
        if not left:
            self.request.end(placeholder)
        elif self.request.may_push(placeholder):
            self.request.push(placeholder, left.pop(0), self.world.rng.randrange(10))
            self.world.later(CLIENT, ("client", placeholder), placeholder)
