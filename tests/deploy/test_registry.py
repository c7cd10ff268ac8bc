"""Who lives: the pure registry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_flow.control.ledger import host_of
from omni_flow.control.runtime.roster import Members
from omni_flow.control.runtime.wire import Record
from omni_flow.deploy.registry import Registry

HERE = "unix:///r.sock"


def record(id: str) -> Record:
    return Record(id, id.partition("/")[0], f"unix:///{id}.sock", "host", 1)


def joined(registry: Registry, id: str) -> None:
    """Register a replica and have everybody see it."""
    assert registry.register(record(id))
    for address in registry.addresses():
        registry.seen(address, registry.version)
    assert not registry.joining(id)


def takers(registry: Registry) -> set[str]:
    """Who takes requests, as a gateway reads the roster."""
    roster = registry.roster()
    return {r.id for r in roster.live if r.id not in roster.leaving}


def test_a_newcomer_takes_requests_once_all_have_seen_it() -> None:
    registry = Registry(HERE)
    joined(registry, "a/0@0")
    registry.register(record("b/0@0"))
    told = registry.version
    assert "b/0@0" in {r.id for r in registry.roster().live}
    assert takers(registry) == {"a/0@0"}
    assert registry.seen("unix:///b/0@0.sock", told) == []
    assert registry.seen("unix:///a/0@0.sock", told - 1) == []
    assert registry.seen("unix:///a/0@0.sock", told) == ["b/0@0"]
    assert takers(registry) == {"a/0@0", "b/0@0"}
    assert registry.version > told


def test_a_death_frees_those_who_waited_for_the_dead() -> None:
    registry = Registry(HERE)
    joined(registry, "a/0@0")
    registry.register(record("b/0@0"))
    registry.seen("unix:///b/0@0.sock", registry.version)
    assert registry.died("a/0@0", "killed") == ["b/0@0"]
    assert takers(registry) == {"b/0@0"}


def test_somebody_who_does_not_answer_is_not_waited_for_for_ever() -> None:
    registry = Registry(HERE)
    joined(registry, "a/0@0")
    registry.register(record("b/0@0"))
    assert registry.stop_waiting("b/0@0") == ["b/0@0"]
    assert registry.stop_waiting("b/0@0") == []
    assert registry.seen("unix:///a/0@0.sock", registry.version) == []


def test_the_next_incarnation_succeeds_the_dead_one_when_it_takes_requests() -> None:
    registry = Registry(HERE)
    joined(registry, "a/0@0")
    registry.died("a/0@0", "killed by SIGKILL")
    assert registry.roster().dead == {"a/0@0": "killed by SIGKILL"}
    registry.register(record("a/0@2"))
    assert registry.roster().successors == {}
    registry.seen("unix:///a/0@2.sock", registry.version)
    assert registry.roster().successors == {"a/0@0": "a/0@2"}


def test_an_incarnation_that_dies_before_it_took_requests_has_no_part_in_the_succession() -> None:
    registry = Registry(HERE)
    joined(registry, "a/0@0")
    registry.died("a/0@0", "x")
    registry.register(record("a/0@1"))
    registry.died("a/0@1", "y")
    joined(registry, "a/0@2")
    assert registry.roster().successors == {"a/0@0": "a/0@2"}


def test_a_known_id_cannot_register_again() -> None:
    registry = Registry(HERE)
    joined(registry, "a/0@0")
    version = registry.version
    assert not registry.register(record("a/0@0"))
    registry.died("a/0@0", "x")
    assert not registry.register(record("a/0@0"))
    assert registry.version == version + 1
    assert registry.died("a/0@0", "again") is None


def test_one_that_leaves_takes_no_requests_and_is_no_dead() -> None:
    registry = Registry(HERE)
    joined(registry, "a/0@0")
    joined(registry, "a/1@0")
    assert registry.leave("a/1@0")
    assert not registry.leave("a/1@0")
    assert takers(registry) == {"a/0@0"}
    assert registry.left("a/1@0") == []
    assert registry.roster().dead == {}
    assert registry.roster().leaving == []


def test_a_gateway_that_is_gone_is_told() -> None:
    registry = Registry(HERE)
    assert registry.subscribe("gw-1", "unix:///gw.sock")
    assert not registry.subscribe("gw-1", "unix:///gw.sock")
    assert registry.addresses() == ["unix:///gw.sock"]
    assert registry.gateway_gone("unix:///gw.sock")
    assert not registry.gateway_gone("unix:///gw.sock")
    assert registry.roster().gateways_gone == ["gw-1"]
    assert not registry.subscribe("gw-1", "unix:///gw.sock")


def test_old_deaths_are_forgotten_the_oldest_first() -> None:
    registry = Registry(HERE, kept=3)
    for epoch in range(6):
        joined(registry, f"a/0@{epoch}")
        registry.died(f"a/0@{epoch}", str(epoch))
    assert list(registry.roster().dead) == ["a/0@3", "a/0@4", "a/0@5"]
    assert registry.roster().successors == {"a/0@3": "a/0@4", "a/0@4": "a/0@5"}


def test_a_place_that_is_given_up_has_its_last_incarnation_as_its_own_successor() -> None:
    registry = Registry(HERE)
    assert not registry.give_up("a/0")
    joined(registry, "a/0@0")
    registry.died("a/0@0", "x")
    members = Members()
    members.apply(registry.roster())
    assert not members.given_up(["a/0@0"], 0)
    assert registry.give_up("a/0")
    members.apply(registry.roster())
    assert members.given_up(["a/0@0"], 0)
    assert members.host(["a/0@0"], 0, True) is None
    assert not registry.give_up("a/0")


steps = st.lists(st.tuples(st.sampled_from(["come", "die", "leave", "left", "see", "late"]), st.integers(0, 5)))


@given(steps)
def test_whatever_happens_the_view_holds_together(steps: list[tuple[str, int]]) -> None:
    registry = Registry(HERE, kept=1000)
    epochs = dict.fromkeys(range(6), -1)
    took: set[str] = set()
    version = 0
    for what, place in steps:
        id = f"r/{place}@{epochs[place]}"
        if what == "come" and id not in registry.live:
            epochs[place] += 1
            assert registry.register(record(f"r/{place}@{epochs[place]}"))
        elif what == "die":
            registry.died(id, "x")
        elif what == "leave":
            registry.leave(id)
        elif what == "left":
            registry.left(id)
        elif what == "see":
            registry.seen(f"unix:///{id}.sock", registry.version)
        elif what == "late":
            registry.stop_waiting(id)
        roster = registry.roster()
        assert roster.version >= version
        version = roster.version
        live = {r.id for r in roster.live}
        assert not live & roster.dead.keys()
        assert set(roster.leaving) <= live
        took |= takers(registry)
        for dead, successor in roster.successors.items():
            assert dead in roster.dead
            assert successor in took
            assert int(successor.rpartition("@")[2]) > int(dead.rpartition("@")[2])
        for dead in roster.dead.keys() & took:
            host = host_of([dead], 0, roster.dead, roster.successors)
            newest = f"r/{dead[2]}@{epochs[int(dead[2])]}"
            assert host is None or host == newest
    for address in registry.addresses():
        registry.seen(address, registry.version)
    assert takers(registry) == registry.live.keys() - registry.leaving
