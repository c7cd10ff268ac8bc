"""Several requests side by side, and what concerns more than one: who is pinned, who leaves, whose gateway dies.

Each request is a `World` of its own (a `Tenant`); the cluster interleaves their events at random and adds its own:
requests are admitted, replicas drain, a gateway dies, rosters arrive late. The registry, everybody's copy of its view
and the book of closed requests are the real ones. Held against the sequential reference, request by request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop
from random import Random

from omni_flow.control.facts import Message
from omni_flow.control.plan import Plan
from omni_flow.control.runtime.closed import ClosedRequests
from omni_flow.control.runtime.roster import Members
from omni_flow.control.runtime.wire import Record, Roster
from omni_flow.deploy.registry import Registry
from omni_flow.testing.compare import compare
from omni_flow.testing.parties import CLIENT, CLOSE, CONSUMED, DELIVER, LOST, TO_GATEWAY, Key, Party, Seat
from omni_flow.testing.schedule import Faults, Schedule
from omni_flow.testing.simulate import Request
from omni_flow.testing.world import World

Number = tuple[str, int]
"""A request: (gateway, number)."""

AT_DESK = frozenset((TO_GATEWAY, CONSUMED, CLIENT, LOST))
"""Events that nobody takes once the gateway is dead."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What happens to a cluster. Moments are counted in steps, as in a `Schedule`.

    `drains`: at which step a replica of which role leaves. `gateway_death`: at which step the second gateway dies; its
    requests are every other one.
    """

    seed: int
    replicas: Mapping[str, int]
    admissions: Sequence[int]
    drains: Sequence[tuple[int, str]] = ()
    gateway_death: int | None = None


def random_traffic(seed: int, roles: Sequence[str], requests: int, steps: int) -> Traffic:
    """Random traffic of `requests` requests, each of about `steps` events: half of it with drains, the other with two
    gateways, of which one mostly dies.
    """
    rng = Random(seed)
    length = steps * requests
    drains: list[tuple[int, str]] = []
    death = None
    if rng.random() < 0.5:
        drains = sorted((rng.randrange(length), rng.choice(roles)) for _ in range(rng.randint(1, 4)))
    else:
        death = rng.randrange(length * 5 // 4)
    return Traffic(
        seed=seed,
        replicas={role: rng.randint(2 if drains else 1, 4) for role in roles},
        admissions=sorted(rng.randrange(length // 2 + 1) for _ in range(requests)),
        drains=drains,
        gateway_death=death,
    )


class SimReplica:
    """A replica of all requests: what it knows of gateways, and whether it ends."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.view = Members()
        self.books: dict[str, ClosedRequests] = {}
        self.tenants: dict[Number, Tenant] = {}
        self.retiring = False
        self.gone = False

    def book(self, gateway: str) -> ClosedRequests:
        return self.books.setdefault(gateway, ClosedRequests())

    def refuses(self, number: Number) -> bool:
        """Whether a request that is not here is over, as far as this replica knows."""
        return self.book(number[0]).is_closed(number[1]) or number[0] in self.view.gateways_gone

    def take(self, roster: Roster) -> None:
        """A roster arrives: the requests of dead gateways are over."""
        if self.view.apply(roster):
            for number in list(self.tenants):
                if number[0] in self.view.gateways_gone:
                    self.forget(number)
            for gateway in self.view.gateways_gone:
                self.books.pop(gateway, None)

    def forget(self, number: Number) -> None:
        tenant = self.tenants.pop(number, None)
        if tenant is not None:
            tenant.close_on(self.id)


class SimGateway:
    """A gateway: its view, its live requests, and the oldest of them."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.view = Members()
        self.live: dict[int, Tenant] = {}
        self.next = 0

    @property
    def oldest(self) -> int:
        return next(iter(self.live), self.next)


class Tenant(World):
    """One request in a cluster. Its shares lie on the replicas that were pinned when it was admitted."""

    def __init__(self, cluster: Cluster, gateway: SimGateway, request: Request, schedule: Schedule) -> None:
        pinned = cluster.pin(gateway)
        shares = {role: len(hosts) for role, hosts in pinned.items()}
        super().__init__(
            request.plan,
            replace(schedule, shares=shares),
            request.inputs,
            request.params,
            request.behave,
            request.expected.given,
            request.patience,
        )
        self.cluster = cluster
        self.gateway = gateway
        self.request = request
        self.number = (gateway.id, gateway.next)
        self.hosts = {(role, share): pinned[self.plan.roles[role].spec.name][share] for role, share in self.epochs}

    def step(self) -> None:
        if self.desk.dead and self.queue[0][2] in AT_DESK:
            heappop(self.queue)
        else:
            super().step()

    def post(self, sender: Party, target: Key, message: Message) -> None:
        """As in a `World`, with the gateway's oldest live request in the header."""
        origin = sender.key if isinstance(sender, Seat) else None
        oldest = self.gateway.oldest
        if isinstance(sender, Seat):
            oldest = self.cluster.replicas[self.hosts[sender.key]].book(self.gateway.id).oldest
        self.later(DELIVER, (origin, target), sender, target, oldest, message, duplicable=True)

    def deliver(self, sender: Party, target: Key, epoch: int, message: Message) -> None:
        """`epoch` is the oldest live request as of the message: in a cluster no share is hosted anew."""
        if self.is_lost(sender):
            return
        replica = self.cluster.replicas[self.hosts[target]]
        if replica.gone:
            self.later(LOST, "registry", None)
            return
        replica.book(self.gateway.id).advance(epoch)
        if self.number in replica.tenants or not replica.refuses(self.number):
            replica.tenants[self.number] = self
            self.seat(target).share.receive(message)

    def stop(self) -> None:
        if not self.desk.dead:
            super().stop()

    def close_all(self) -> None:
        if not self.closing:
            self.closing = True
            del self.gateway.live[self.number[1]]
            for key in self.epochs:
                self.later(CLOSE, (None, key), key, self.gateway.oldest)
            self.cluster.look_at_drains()

    def close(self, key: Key, epoch: int) -> None:
        if self.is_lost(self.desk):
            return
        replica = self.cluster.replicas[self.hosts[key]]
        book = replica.book(self.gateway.id)
        book.close(self.number[1])
        book.advance(epoch)
        replica.forget(self.number)
        if replica.retiring:
            self.cluster.retire(replica)

    def close_on(self, replica: str) -> None:
        """A replica forgets the request."""
        for key, seat in self.seats.items():
            if self.hosts[key] == replica:
                seat.closed = True
                seat.share.close()

    def check_closed(self) -> None:
        """Nothing of this request is left anywhere."""
        for key, seat in self.seats.items():
            census = seat.share.census()
            if any(number for what, number in census.items() if what != "untouched"):
                self.seen.left.append(f"{self.hosts[key]} after close: {census}")
        for replica in self.cluster.replicas.values():
            if self.number in replica.tenants:
                self.seen.left.append(f"{replica.id} still knows the request")


@dataclass
class Outcomes:
    """What a cluster came to: divergences as text, and how often what happened."""

    divergences: list[str] = field(default_factory=list)
    requests: int = 0
    drained: int = 0
    orphaned: int = 0
    events: int = 0

    def add(self, other: Outcomes) -> None:
        self.divergences += other.divergences
        self.requests += other.requests
        self.drained += other.drained
        self.orphaned += other.orphaned
        self.events += other.events


class Cluster:
    """Runs several requests of one graph. One use.

    `schedules[k]` is that of `requests[k]`, but for the number of shares: that follows from who is pinned.
    """

    def __init__(
        self, plan: Plan, traffic: Traffic, requests: Sequence[Request], schedules: Sequence[Schedule]
    ) -> None:
        self.traffic = traffic
        self.rng = Random(traffic.seed)
        self.arriving = list(zip(traffic.admissions, requests, schedules, strict=True))
        self.drains = list(traffic.drains)
        self.death = traffic.gateway_death
        self.tenants: list[Tenant] = []
        self.events: list[Callable[[], object]] = []
        self.leaving: set[str] = set()
        self.came = Outcomes()
        self.steps = 0
        self.registry = Registry("gw0")
        self.replicas: dict[str, SimReplica] = {}
        for role in plan.roles:
            for k in range(traffic.replicas[role.spec.name]):
                id = f"{role.spec.name}/{k}@0"
                self.replicas[id] = SimReplica(id)
                self.registry.register(Record(id, role.spec.name, id, "here", 0))
                self.registry.stop_waiting(id)
        self.gateways = [SimGateway("gw0")] + ([] if self.death is None else [SimGateway("gw1")])
        for gateway in self.gateways:
            self.registry.subscribe(gateway.id, gateway.id)
        roster = self.registry.roster()
        for view in [party.view for party in self.gateways] + [party.view for party in self.replicas.values()]:
            view.apply(roster)
        self.roles = [role.spec.name for role in plan.roles]

    def pin(self, gateway: SimGateway) -> dict[str, list[str]]:
        """The replicas of a new request, by role, in an order of its own."""
        pinned = {}
        for role in self.roles:
            ids = [record.id for record in gateway.view.of_role(role)]
            pinned[role] = self.rng.sample(ids, len(ids))
        return pinned

    # ---- the run --------------------------------------------------------------------------------------------

    def run(self) -> Outcomes:
        """Run until nothing is left to happen."""
        while self._go_on():
            self.steps += 1
        for tenant in self.tenants:
            self._judge(tenant)
        self.came.divergences += [f"{id} never left" for id in self.leaving if not self.replicas[id].gone]
        return self.came

    def _go_on(self) -> bool:
        self._occur()
        ready = [tenant for tenant in self.tenants if tenant.queue]
        if self.events and (not ready or self.rng.random() < 0.2):
            self.events.pop(self.rng.randrange(len(self.events)))()
        elif ready:
            self.rng.choice(ready).step()
        elif not self._run_out():
            moments = [at for at, _, _ in self.arriving] + [at for at, _ in self.drains]
            moments += [] if self.death is None else [self.death]
            if not moments:
                return False
            self.steps = max(self.steps, min(moments))
        return True

    def _occur(self) -> None:
        """What the traffic has for this moment."""
        while self.arriving and self.arriving[0][0] <= self.steps:
            _, request, schedule = self.arriving.pop(0)
            gateway = self.gateways[len(self.tenants) % len(self.gateways)]
            tenant = Tenant(self, gateway, request, schedule)
            gateway.live[gateway.next] = tenant
            gateway.next += 1
            self.tenants.append(tenant)
            tenant.begin()
        while self.drains and self.drains[0][0] <= self.steps:
            self._drain(self.drains.pop(0)[1])
        if self.death is not None and self.death <= self.steps:
            self.death = None
            self._gateway_dies(self.gateways.pop())

    def _run_out(self) -> bool:
        done = [t for t in self.tenants if t.desk.request.outcome is not None and not t.desk.dead]
        return sum(tenant.runs_out() for tenant in done) > 0

    def _judge(self, tenant: Tenant) -> None:
        seen, request = tenant.seen, tenant.request
        if tenant.desk.request.outcome is None and not seen.orphaned:
            seen.left.append("no outcome, and nothing left to happen")
        tenant.check_closed()
        self.came.requests += 1
        self.came.orphaned += seen.orphaned and seen.outcome is None
        self.came.events += seen.steps
        self.came.divergences += compare(
            request.plan, request.spec, request.inputs, request.params, request.behave, tenant.schedule, seen,
            request.expected,
        )  # fmt: skip

    # ---- membership -----------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Everybody gets the present roster: the registry's own gateway now, the others some time."""
        roster = self.registry.roster()
        self.gateways[0].view.apply(roster)
        for gateway in self.gateways[1:]:
            self.events.append(partial(gateway.view.apply, roster))
        for replica in self.replicas.values():
            self.events.append(partial(replica.take, roster))

    def _drain(self, role: str) -> None:
        """A replica of a role takes no new requests from now on, unless it is the last that does."""
        present = [record.id for record in self.gateways[0].view.of_role(role)]
        if len(present) > 1:
            id = self.rng.choice(present)
            self.leaving.add(id)
            self.registry.leave(id)
            self._tell()
            self.look_at_drains()

    def look_at_drains(self) -> None:
        """Replicas that no live request names are told to go once they are empty."""
        for id in sorted(self.leaving):
            if not any(id in tenant.hosts.values() for tenant in self.gateways[0].live.values()):
                self.events.append(partial(self.retire, self.replicas[id]))

    def retire(self, replica: SimReplica) -> None:
        """A replica that was told to go: it goes when it is empty."""
        replica.retiring = True
        if not replica.tenants and not replica.gone:
            replica.gone = True
            self.came.drained += 1
            self.registry.left(replica.id)
            self._tell()

    def _gateway_dies(self, gateway: SimGateway) -> None:
        for tenant in gateway.live.values():
            tenant.seen.orphaned = True
        for tenant in self.tenants:
            if tenant.gateway is gateway:
                tenant.desk.dead = True
        self.events.append(partial(self._gateway_is_missed, gateway))

    def _gateway_is_missed(self, gateway: SimGateway) -> None:
        if self.registry.gateway_gone(gateway.id):
            self._tell()


def run_cluster(seed: int, requests: Sequence[Request]) -> Outcomes:
    """Several requests of one graph under random schedules and random traffic."""
    rng = Random(seed)
    plan = requests[0].plan
    traffic = random_traffic(rng.getrandbits(48), [r.spec.name for r in plan.roles], len(requests), requests[0].steps)
    faults = Faults(deaths=False, losses=False)
    schedules = [request.schedule(rng.getrandbits(48), faults) for request in requests]
    return Cluster(plan, traffic, requests, schedules).run()
