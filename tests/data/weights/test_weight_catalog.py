"""The weight catalog alone: one loader for each tensor, holds by session, lingering, versions."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_flow.data.errors import BadArgument, BadToken, UnknownName
from omni_flow.data.weights.catalog import Catalog
from omni_flow.data.weights.errors import SwitchRefused
from omni_flow.data.weights.names import Family, TensorSpec, WeightName

FAMILY = Family("demo/model", "r1")
DIGEST = b"d" * 16
LINGER = 10.0


def spec(path, shape=(4, 8), **fields):
    return TensorSpec(WeightName(family=FAMILY, path=path, dtype="f32", **fields), shape)


A, B, C = spec("a"), spec("b"), spec("c")


def load(catalog, session, specs, version=None, now=0.0):
    grant = catalog.ask(session, FAMILY, specs, version, now).grant
    catalog.seal(session, grant.token, [DIGEST] * len(grant.specs), now)
    return grant


def test_the_first_comer_loads_and_the_second_gets_the_same_segment():
    catalog = Catalog(LINGER)
    grant = load(catalog, 1, [A, B])
    answer = catalog.ask(2, FAMILY, [B, A], None, 0.0)
    assert answer.grant is None
    assert [entry.spec for entry in answer.ready] == [B, A]
    assert {entry.segment for entry in answer.ready} == {grant.segment}
    assert all(entry.offset % 256 == 0 for entry in answer.ready)


def test_an_asker_gets_what_is_there_loads_what_is_absent_and_waits_for_the_rest():
    catalog = Catalog(LINGER)
    load(catalog, 1, [A])
    catalog.ask(2, FAMILY, [B], None, 0.0)
    answer = catalog.ask(3, FAMILY, [A, B, C], None, 0.0)
    assert [entry.spec for entry in answer.ready] == [A]
    assert answer.grant.specs == (C,)
    assert answer.loading == 1
    assert catalog.blocked(FAMILY, [B], None, may_load=True) == [2]
    assert catalog.blocked(FAMILY, [A, B], None, may_load=True) == [2]
    assert catalog.blocked(FAMILY, [A], None, may_load=True) == []


@pytest.mark.parametrize("end", ["gives up", "dies"])
def test_a_loader_that_ends_hands_over_to_the_next(end):
    catalog = Catalog(LINGER)
    first = catalog.ask(1, FAMILY, [A], None, 0.0).grant
    if end == "dies":
        assert list(catalog.closed(1, 0.0)) == [first.segment]
    else:
        assert catalog.give_up(1, first.token) == first.segment
    assert catalog.ask(2, FAMILY, [A], None, 0.0).grant.specs == (A,)
    with pytest.raises(BadToken):
        catalog.seal(1, first.token, [DIGEST], 0.0)


def test_nobody_seals_the_grant_of_another():
    catalog = Catalog(LINGER)
    grant = catalog.ask(1, FAMILY, [A], None, 0.0).grant
    with pytest.raises(BadToken):
        catalog.seal(2, grant.token, [DIGEST], 0.0)
    with pytest.raises(BadArgument, match="one of 16 bytes"):
        catalog.seal(1, grant.token, [], 0.0)


def test_a_segment_lingers_after_its_last_holder_and_then_goes():
    catalog = Catalog(LINGER)
    grant = load(catalog, 1, [A])
    catalog.ask(2, FAMILY, [A], None, 0.0)
    catalog.release(1, grant.segment, 1.0)
    assert catalog.next_expiry() is None
    assert list(catalog.closed(2, 2.0)) == [None]
    assert catalog.next_expiry() == 2.0 + LINGER
    assert catalog.expire(2.0 + LINGER - 0.1) == []
    assert catalog.ask(3, FAMILY, [A], None, 3.0).ready
    assert catalog.next_expiry() is None
    catalog.release(3, grant.segment, 4.0)
    assert catalog.expire(4.0 + LINGER) == [grant.segment]
    assert catalog.ask(4, FAMILY, [A], None, 20.0).grant


def test_releasing_more_than_was_held_is_refused():
    catalog = Catalog(LINGER)
    grant = load(catalog, 1, [A])
    catalog.release(1, grant.segment, 0.0)
    with pytest.raises(BadToken, match="not held"):
        catalog.release(1, grant.segment, 0.0)


def test_a_staged_version_is_seen_by_nobody_until_the_switch():
    catalog = Catalog(LINGER)
    old = load(catalog, 1, [A, B])
    new = load(catalog, 2, [A, B], version=1)
    assert {entry.segment for entry in catalog.ask(3, FAMILY, [A, B], None, 0.0).ready} == {old.segment}
    assert catalog.switch(FAMILY, 1) == 0
    assert {entry.segment for entry in catalog.ask(3, FAMILY, [A, B], None, 0.0).ready} == {new.segment}
    assert catalog.current(FAMILY) == 1


def test_a_switch_needs_every_tensor_of_the_current_version_and_a_higher_number():
    catalog = Catalog(LINGER)
    load(catalog, 1, [A, B])
    load(catalog, 1, [A], version=3)
    with pytest.raises(SwitchRefused, match="lacks b"):
        catalog.switch(FAMILY, 3)
    grant = catalog.ask(1, FAMILY, [B, C], 3, 0.0).grant
    with pytest.raises(SwitchRefused):
        catalog.switch(FAMILY, 3)
    catalog.seal(1, grant.token, [DIGEST] * 2, 0.0)
    assert catalog.switch(FAMILY, 3) == 0
    with pytest.raises(SwitchRefused, match="only go up"):
        catalog.switch(FAMILY, 2)


def test_an_old_version_goes_with_its_last_holder_and_is_not_loaded_again():
    catalog = Catalog(LINGER)
    old = load(catalog, 1, [A])
    load(catalog, 2, [A], version=1)
    catalog.switch(FAMILY, 1)
    assert catalog.expire(0.0) == []
    catalog.release(1, old.segment, 1.0)
    assert catalog.next_expiry() == 0.0
    assert catalog.expire(1.0) == [old.segment]
    with pytest.raises(UnknownName, match="version 1 is current"):
        catalog.ask(1, FAMILY, [A], 0, 1.0)


def test_a_name_with_another_shape_is_refused():
    catalog = Catalog(LINGER)
    load(catalog, 1, [A])
    with pytest.raises(BadArgument, match="asked for as"):
        catalog.ask(2, FAMILY, [spec("a", (8, 4))], None, 0.0)
    with pytest.raises(BadArgument, match="twice"):
        catalog.ask(2, FAMILY, [B, B], None, 0.0)


def test_an_asker_that_may_not_load_waits():
    catalog = Catalog(LINGER)
    assert catalog.blocked(FAMILY, [A], None, may_load=False) == [0]
    load(catalog, 1, [A])
    assert catalog.blocked(FAMILY, [A], None, may_load=False) == []


@pytest.mark.parametrize(
    "fields",
    [{"shard_axis": 0}, {"shard_count": 2}, {"shard_axis": 0, "shard_count": 2, "shard_index": 2}],
)
def test_a_shard_that_cannot_be_is_refused(fields):
    with pytest.raises(BadArgument, match="shard"):
        Catalog(LINGER).ask(1, FAMILY, [spec("a", **fields)], None, 0.0)


def test_names_that_differ_in_any_field_have_different_keys():
    fields = ["quantisation", "layout"]
    names = [A.name, B.name, spec("a", layer=1).name, spec("a", shard_axis=1, shard_count=2).name]
    names += [spec("a", **{field: "x"}).name for field in fields]
    assert len({name.key() for name in names}) == len(names)
    assert all(len(name.key()) == 32 for name in names)


class CatalogMachine(RuleBasedStateMachine):
    """Any sequence of asks, seals, failures, deaths and switches keeps the books."""

    def __init__(self):
        super().__init__()
        self.catalog = Catalog(LINGER)
        self.now = 0.0
        self.grants = []
        self.segments = set()
        self.pool = [spec(path) for path in "abcd"]

    @rule(session=st.integers(1, 3), mask=st.integers(1, 15), ahead=st.sampled_from([None, 0, 1]))
    def ask(self, session, mask, ahead):
        specs = [s for n, s in enumerate(self.pool) if mask >> n & 1]
        version = None if ahead is None else self.catalog.current(FAMILY) + ahead
        blocked = self.catalog.blocked(FAMILY, specs, version, may_load=True)
        answer = self.catalog.ask(session, FAMILY, specs, version, self.now)
        granted = len(answer.grant.specs) if answer.grant else 0
        assert len(answer.ready) + granted + answer.loading == len(specs)
        assert bool(blocked) == (not granted and answer.loading > 0)
        if answer.grant:
            taken = {(s.name.path, g.version) for g in self.grants for s in g.specs}
            assert not taken & {(s.name.path, answer.version) for s in answer.grant.specs}
            self.grants.append(answer.grant)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), good=st.booleans())
    def end_load(self, data, good):
        grant = self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1)))
        if good:
            self.catalog.seal(grant.session, grant.token, [DIGEST] * len(grant.specs), self.now)
            self.segments.add(grant.segment)
        else:
            assert self.catalog.give_up(grant.session, grant.token) == grant.segment

    @rule(session=st.integers(1, 3))
    def die(self, session):
        gone = {segment for segment in self.catalog.closed(session, self.now) if segment is not None}
        assert gone == {grant.segment for grant in self.grants if grant.session == session}
        self.grants = [grant for grant in self.grants if grant.session != session]

    @rule(seconds=st.sampled_from([1.0, 6.0, 20.0]))
    def time_goes_by(self, seconds):
        self.now += seconds
        gone = self.catalog.expire(self.now)
        assert set(gone) <= self.segments
        self.segments -= set(gone)
        expiry = self.catalog.next_expiry()
        assert expiry is None or expiry > self.now

    @rule()
    def switch(self):
        version = self.catalog.current(FAMILY) + 1
        try:
            self.catalog.switch(FAMILY, version)
        except SwitchRefused:
            return
        assert self.catalog.current(FAMILY) == version

    @invariant()
    def sound(self):
        assert self.catalog.check() == []
        assert self.catalog.stats()["weight_segments"] == len(self.segments)
        assert self.catalog.stats()["weight_loading"] == sum(len(grant.specs) for grant in self.grants)


CatalogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCatalogMachine = CatalogMachine.TestCase
