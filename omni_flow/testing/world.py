"""One request under one schedule: the real shares, ledgers and gateway request, everything around them simulated.

Messages, role code, the client and the announcement of deaths are events on a virtual clock. A *party* is who sends:
the gateway, or one incarnation of a share (a *seat*); a share that is hosted anew is another seat under a new epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from omni_flow.control.facts import END, FAILED, Message
from omni_flow.control.host import Activation, RoleError
from omni_flow.control.ledger import host_of
from omni_flow.control.plan import Path, Plan
from omni_flow.control.request import Outcome
from omni_flow.testing import facts
from omni_flow.testing.batching import Batches
from omni_flow.testing.facts import Behave, Given
from omni_flow.testing.parties import (
    ANNOUNCE,
    BATCH,
    CALLED,
    CLIENT,
    CLOSE,
    CONSUMED,
    DELIVER,
    LOST,
    RUN,
    TO_GATEWAY,
    Desk,
    Key,
    Observed,
    Party,
    Seat,
)
from omni_flow.testing.schedule import Schedule, delays

SLOWNESS: Final = 300.0


class World:
    """Runs one request. One use.

    `known` are the inputs and outputs of activations as the reference had them, which saves calling `behave` again.
    A run of more than `patience` steps is taken for one that never ends.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        inputs: Mapping[str, Any],
        params: Mapping[str, Any],
        behave: Behave,
        known: Mapping[tuple[str, Path], tuple[Mapping[str, Any], Given]] | None = None,
        patience: int = 1_000_000,
    ) -> None:
        self.plan = plan
        self.schedule = schedule
        self.params = {param.name: param.default for param in plan.spec.params} | dict(params)
        self.behave = behave
        self.known = known or {}
        self.patience = patience
        self.seen = Observed(outputs={o.name: [] for o in plan.outputs if not o.hidden})
        self.shares: Sequence[int] = [schedule.shares[role.spec.name] for role in plan.roles]
        keys: list[Key] = [(role.id, share) for role in plan.roles for share in range(self.shares[role.id])]
        self.epochs: dict[Key, int] = dict.fromkeys(keys, 0)
        self.replicas: dict[int, list[str]] = {
            role.id: [f"{role.spec.name}.{share}" for share in range(self.shares[role.id])] for role in plan.roles
        }
        self.hosts: dict[Key, str] = {key: self.replicas[key[0]][key[1]] for key in keys}
        self.dead: set[str] = set()
        self.successors: dict[str, str] = {}
        self.seats: dict[Key, Seat] = {}
        self.batches = Batches(self)
        self.ids = {role.spec.name: role.id for role in plan.roles}
        self.slow = self.ids.get(schedule.slow) if schedule.slow is not None else None
        self.closing = False
        self.deaths = sorted(schedule.deaths, key=lambda death: -death.step)
        self.rng = Random(schedule.seed)
        self.delay = delays(schedule, self.rng)
        self.queue: list[tuple[float, int, int, Any, Any, Any, Any]] = []
        self.now = 0.0
        self.serial = 0
        self.age = {"lifo": -1, "fifo": 1}.get(schedule.order, 0)
        self.desk = Desk(self, inputs)
        self.inputs = {name: value for name, value in inputs.items() if value is not None}

    # Time

    def later(
        self,
        kind: int,
        channel: object,
        a: Any,
        b: Any = None,
        c: Any = None,
        d: Any = None,
        *,
        duplicable: bool = False,
        slow: bool = False,
    ) -> None:
        """Queue an event, perhaps twice."""
        while True:
            self.serial += 1
            if self.age:
                at = float(self.age * self.serial)
            else:
                at = self.now + self.delay(channel) * (SLOWNESS if slow else 1.0)
            heappush(self.queue, (at, self.serial, kind, a, b, c, d))
            if not duplicable or self.rng.random() >= self.schedule.duplicates:
                return
            self.seen.duplicates += 1

    def post(self, sender: Party, target: Key, message: Message) -> None:
        origin = sender.key if isinstance(sender, Seat) else None
        self.later(DELIVER, (origin, target), sender, target, sender.view[target], message, duplicable=True)

    def is_slow(self, key: Key) -> bool:
        return key[0] == self.slow

    # What is seen

    def note(self, message: Message) -> None:
        """Remember what is said, and that nothing else was said before."""
        key = (message.ref, message.path)
        if message.kind <= FAILED:
            said = self.seen.facts.setdefault(key, message)
            same = said is message or (
                said.kind == message.kind and (said.kind == FAILED or said.value == message.value)
            )
        elif message.kind == END:
            end = (message.number, bool(message.value))
            same = self.seen.ends.setdefault(key, end) == end
        else:
            return
        if not same:
            self.seen.contradictions.append(f"two facts of {key}: {message!r} after another")

    def behaviour(self, activation: Activation) -> Given:
        interface, path = activation.interface, activation.path
        key = (interface.name, path)
        self.seen.runs.setdefault(key, []).append((activation.group, activation.inputs))
        self.seen.starts.setdefault(interface.name, []).append(path)
        known = self.known.get(key)
        if known is not None and known[0] == activation.inputs:
            return known[1]
        names = [self.plan.sources[source].name for source in interface.scope]
        iteration, last = 0, False
        for source, number in zip(interface.scope, path, strict=True):
            if self.plan.sources[source].kind == "loop":
                head = self.plan.interfaces[self.plan.sources[source].creator]
                iteration, last = number, number + 1 >= head.max_iters
        return self.behave(
            facts.Activation(
                interface.name,
                tuple(zip(names, path, strict=True)),
                activation.group,
                activation.inputs,
                self.params,
                iteration,
                last,
            )
        )

    # The run

    def run(self) -> Observed:
        """Run the request until nothing is left to happen."""
        self.begin()
        self.work()
        if self.desk.request.outcome is None:
            self.seen.left.append("no outcome, and nothing left to happen")
        elif self.runs_out():
            self.work()
        self.check_closed()
        return self.seen

    def begin(self) -> None:
        """The gateway and the client start the request."""
        self.desk.request.start(self.inputs)
        for placeholder in self.desk.frames:
            self.later(CLIENT, ("client", placeholder), placeholder)

    def runs_out(self) -> bool:
        """Nothing is left to happen: look what is left of the request, and close it, unless that was done."""
        if self.closing:
            return False
        self.seen.left += self.what_is_left()
        self.close_all()
        return True

    def work(self) -> None:
        while self.queue:
            self.step()

    def step(self) -> None:
        """Let the next event happen, and what the schedule has for this moment."""
        seen, stop = self.seen, self.schedule.stop
        if stop is not None and seen.steps == stop.step and self.desk.request.outcome is None:
            self.stop()
        while self.deaths and self.deaths[-1].step <= seen.steps:
            death = self.deaths.pop()
            self.kill((self.ids[death.role], death.share))
        seen.steps += 1
        if seen.steps > self.patience:
            seen.left.append(f"still busy after {self.patience} steps")
            self.queue.clear()
            return
        self.now, _, kind, a, b, c, d = heappop(self.queue)
        if kind == DELIVER:
            self.deliver(a, b, c, d)
        elif kind == RUN:
            self.go_on(a, b)
        elif kind == TO_GATEWAY:
            if not self.is_lost(a):
                self.desk.request.receive(b)
        elif kind == CONSUMED:
            self.desk.request.consumed(a)
        elif kind == CLIENT:
            self.desk.push(a)
        elif kind == BATCH:
            self.batches.call(a, b)
        elif kind == CALLED:
            self.batches.called(a)
        elif kind == CLOSE:
            self.close(a, b)
        elif kind == ANNOUNCE:
            self.announce(a, b, c)
        else:
            self.desk.request.decide(Outcome.FAILED, {})
            self.seen.lost = True
            self.close_all()

    def seat(self, key: Key) -> Seat:
        seat = self.seats.get(key)
        if seat is None:
            seat = self.seats[key] = Seat(self, key)
        return seat

    def is_lost(self, sender: Party) -> bool:
        """Whether a message that is on its way dies with its sender."""
        return sender.dead and self.rng.random() < 0.5

    def deliver(self, sender: Party, target: Key, epoch: int, message: Message) -> None:
        if epoch != self.epochs[target] or self.is_lost(sender):
            return
        seat = self.seat(target)
        if not seat.closed:
            seat.share.receive(message)

    def go_on(self, seat: Seat, activation: Activation) -> None:
        """Role code gives some outputs, or returns, or raises."""
        if seat.dead or activation.closed:
            return
        share, course = seat.share, activation.context
        outputs = activation.interface.outputs
        gives = course.given.gives
        while course.position < len(gives):
            name, value = gives[course.position]
            index = next((k for k, output in enumerate(outputs) if output.name == name), None)
            if index is None:
                share.fail(activation, f"unknown output {name!r}")
                return
            if not share.may_give(activation, index):
                course.parked = True
                return
            try:
                share.give(activation, index, value, self.rng.randrange(10))
            except RoleError as error:
                share.fail(activation, str(error))
                return
            course.position += 1
            if self.rng.random() < 0.5:
                self.later(RUN, ("run", seat.key), seat, activation, slow=self.is_slow(seat.key))
                return
        if course.given.raises:
            share.fail(activation, "raised")
        else:
            share.finish(activation)

    # Faults and the end

    def stop(self) -> None:
        stop = self.schedule.stop
        assert stop is not None
        self.seen.stopped = True
        self.desk.request.decide(Outcome.CANCELLED if stop.how == "cancel" else Outcome.DEADLINE)
        self.close_all()

    def kill(self, key: Key) -> None:
        """The replica that hosts a share dies, with all shares that it hosts; each living party will be told."""
        replica = self.hosts[key]
        self.dead.add(replica)
        self.successors[replica] = f"{replica}'"
        self.seen.deaths += 1
        parties = [self.desk, *self.seats.values()]
        for other, host in self.hosts.items():
            if host != replica or other[0] != key[0]:
                continue
            seat = self.seats.pop(other, None)
            if seat is not None:
                seat.dead = True
            self.epochs[other] += 1
            found = host_of(self.replicas[key[0]], other[1], self.dead, self.successors)
            assert found is not None, "a successor is started at once"
            self.hosts[other] = found
            for party in parties:
                self.later(ANNOUNCE, "registry", party, other, self.epochs[other])

    def announce(self, party: Party, key: Key, epoch: int) -> None:
        if party.dead or (isinstance(party, Seat) and party.closed):
            return
        party.view[key] = max(party.view[key], epoch)
        if party is self.desk and self.closing:
            self.later(CLOSE, (None, key), key, party.view[key])
            return
        sent = party.ledger.died(*key)
        if sent is None:
            self.later(LOST, "registry", None)
            return
        for message, _ in sent:
            self.post(party, key, message)

    def outcome_is_known(self) -> None:
        if not self.schedule.drain:
            self.close_all()

    def close_all(self) -> None:
        """The gateway sends close to every share."""
        if not self.closing:
            self.closing = True
            for key in self.epochs:
                self.later(CLOSE, (None, key), key, self.desk.view[key])

    def close(self, key: Key, epoch: int) -> None:
        if epoch == self.epochs[key]:
            seat = self.seat(key)
            if not seat.closed:
                seat.closed = True
                seat.share.close()

    def what_is_left(self) -> list[str]:
        """Buckets, activations and credit that should be gone when a request has run out."""
        left = []
        if self.desk.request.open_numbers:
            left.append(f"gateway: {self.desk.request.open_numbers} open numbers")
        for key, seat in self.seats.items():
            name = f"{self.plan.roles[key[0]].spec.name}[{key[1]}]"
            for what, number in seat.share.census().items():
                if number and (what != "untouched" or key[1] == 0):
                    left.append(f"{name}: {number} {what}")
        return left

    def check_closed(self) -> None:
        for key, seat in self.seats.items():
            census = seat.share.census()
            if not seat.closed or any(number for what, number in census.items() if what != "untouched"):
                name = f"{self.plan.roles[key[0]].spec.name}[{key[1]}]"
                self.seen.left.append(f"{name} after close: closed {seat.closed}, {census}")
