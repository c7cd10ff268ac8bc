"""Several requests with drains, deaths of gateways and late rosters agree with the reference; each rule is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from omni_flow.control.compile import compile_spec
from omni_flow.control.runtime.closed import ClosedRequests
from omni_flow.control.runtime.roster import Members
from omni_flow.control.runtime.wire import Record, Roster
from omni_flow.testing.cluster import Cluster, Number, Outcomes, SimGateway, SimReplica, run_cluster
from omni_flow.testing.generate import SHAPES, random_inputs, random_request
from omni_flow.testing.simulate import Request
from omni_flow.testing.standins import Standins

Patch = pytest.MonkeyPatch
CLUSTERS = 300
REQUESTS = 4


def cluster(seed: int) -> Outcomes:
    """One random graph, a few requests of it, random traffic."""
    rng = Random(seed)
    spec = random_request(rng, SHAPES[seed % len(SHAPES)]).spec
    plan = compile_spec(spec)
    requests = [
        Request(plan, spec, random_inputs(rng, spec), {}, Standins(spec, rng.getrandbits(32))) for _ in range(REQUESTS)
    ]
    return run_cluster(seed, requests)


def test_requests_under_drains_and_a_dying_gateway_agree_with_the_reference() -> None:
    came = Outcomes()
    for seed in range(CLUSTERS):
        came.add(cluster(seed))
    assert came.divergences == []
    assert came.requests == CLUSTERS * REQUESTS
    assert min(came.drained, came.orphaned) > 50


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_five_thousand_clusters_agree() -> None:
    for seed in range(10_000, 15_000):
        assert cluster(seed).divergences == [], seed


def a_leaving_replica_is_not_pinned(patch: Patch) -> None:
    def of_role(self: Members, role: str) -> list[Record]:
        return [record for record in self.live.values() if record.role == role]

    patch.setattr(Members, "of_role", of_role)


def a_drain_waits_for_the_requests_that_name_the_replica(patch: Patch) -> None:
    def at_once(self: Cluster) -> None:
        self.events += [lambda replica=self.replicas[id]: self.retire(replica) for id in sorted(self.leaving)]

    patch.setattr(Cluster, "look_at_drains", at_once)


def a_replica_that_was_told_to_go_waits_until_it_is_empty(patch: Patch) -> None:
    retire = Cluster.retire

    def now(self: Cluster, replica: SimReplica) -> None:
        kept, replica.tenants = replica.tenants, {}
        retire(self, replica)
        replica.tenants = kept

    patch.setattr(Cluster, "retire", now)
    a_drain_waits_for_the_requests_that_name_the_replica(patch)


def a_closed_request_is_one_bit(patch: Patch) -> None:
    patch.setattr(ClosedRequests, "is_closed", lambda self, number: False)


def what_lies_below_the_oldest_live_request_is_closed(patch: Patch) -> None:
    """Bits below it are gone, and a number says nothing."""

    def advance(self: ClosedRequests, oldest: int) -> None:
        self.oldest = max(self.oldest, oldest)
        self._closed = {number for number in self._closed if number >= self.oldest}

    patch.setattr(ClosedRequests, "advance", advance)
    patch.setattr(ClosedRequests, "is_closed", lambda self, number: number in self._closed)


def the_oldest_live_request_is_the_oldest(patch: Patch) -> None:
    patch.setattr(SimGateway, "oldest", property(lambda self: next(reversed(self.live), self.next)))


def a_dead_gateways_requests_are_forgotten(patch: Patch) -> None:
    patch.setattr(SimReplica, "take", lambda self, roster: self.view.apply(roster) and None)


def late_messages_of_a_dead_gateways_requests_are_refused(patch: Patch) -> None:
    def refuses(self: SimReplica, number: Number) -> bool:
        return self.book(number[0]).is_closed(number[1])

    patch.setattr(SimReplica, "refuses", refuses)


def a_dead_gateway_is_announced_to_all(patch: Patch) -> None:
    """The announcement reaches only who learns the roster next, for another reason."""
    apply = Members.apply

    def deaf(self: Members, roster: Roster) -> bool:
        return not roster.gateways_gone and apply(self, roster)

    patch.setattr(Members, "apply", deaf)


RULES: Sequence[Callable[[Patch], None]] = [
    a_leaving_replica_is_not_pinned,
    a_drain_waits_for_the_requests_that_name_the_replica,
    a_replica_that_was_told_to_go_waits_until_it_is_empty,
    a_closed_request_is_one_bit,
    what_lies_below_the_oldest_live_request_is_closed,
    the_oldest_live_request_is_the_oldest,
    a_dead_gateways_requests_are_forgotten,
    late_messages_of_a_dead_gateways_requests_are_refused,
    a_dead_gateway_is_announced_to_all,
]


@pytest.mark.parametrize("switch_off", RULES, ids=lambda rule: rule.__name__)
def test_without_the_rule_some_cluster_departs_from_the_reference(
    switch_off: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    switch_off(monkeypatch)
    assert any(cluster(seed).divergences for seed in range(CLUSTERS))
