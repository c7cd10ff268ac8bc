"""Each finding about a role's class, its methods and their parameters, with its exact words."""

# ruff: noqa: C408
from __future__ import annotations

from collections.abc import Callable, Iterator

from omni_flow.control.graph import Graph
from omni_flow.control.slots import Batch, optional, stream

from .linting import declare, only, says
from .roles import One


class Odd:
    """Methods that lint has something to say about."""

    def only(self, x, /):
        return x

    def context(self, ctx, x):
        return x

    def iterate(self, x) -> Iterator[int]:
        return iter((x,))


class Needy:
    def __init__(self, model: str) -> None:
        self.model = model

    def take(self, x):
        return x


class Needy2:
    def take(self, x):
        return x


def made(**options) -> Callable[[], One]:
    """A factory whose class only its annotation tells."""

    def make() -> One:
        return One()

    return make


def test_a_clean_graph_has_no_finding():
    assert declare("take").lint() == []


def test_no_such_method():
    says(
        only(declare("tale")),
        "no-such-method",
        "class One of role 'a' has no method 'tale'",
        "did you mean 'take'?",
    )
    assert only(declare("zzz", Needy2)).mend == "its methods: 'take'"


def test_the_class_behind_a_factory_is_known_by_its_annotation():
    g = Graph("g")
    x = g.placeholder("x", str)
    g.output(o=g.role("a", made()).interface("tale", [[x]], ["o"]).o)
    assert only(g).code == "no-such-method"


def test_a_role_whose_class_cannot_be_known_is_not_judged():
    g = Graph("g")
    g.output(o=g.role("a", lambda: One()).interface("zzz", [[g.placeholder("x", str)]], ["o"]).o)
    assert g.lint() == []


def test_unknown_parameter():
    g = declare("maybe", slots=lambda g, x: [[x, dict(yy=x)]])
    says(
        only(g),
        "unknown-parameter",
        "'a.maybe' has no parameter 'yy', to which 'x' is bound",
        "bind by name: dict(y=...); its parameters: 'x', 'y'",
    )


def test_keyword_arguments_take_any_parameter():
    assert declare("many", slots=lambda g, x: [[dict(a=x, b=x)]]).lint() == []


def test_positional_parameter():
    says(
        only(declare("only", Odd)),
        "positional-parameter",
        "parameter 'x' of 'a.only' is positional-only",
        "move it behind the / of the signature: arguments are passed by name",
    )


def test_reserved_parameter():
    says(
        only(declare("context", Odd, lambda g, x: [[x, dict(ctx=x)]])),
        "reserved-parameter",
        "'a.context' gets its context as 'ctx', but a slot binds 'x' to it",
        "bind the field to another parameter: dict(other=field)",
    )


def test_the_context_needs_no_slot():
    assert declare("context", Odd).lint() == []


def test_missing_parameter():
    says(
        only(declare("both")),
        "missing-parameter",
        "parameter 'y' of 'a.both' has no default and no slot binds it",
        "bind a field to it, or give it a default",
    )


def test_missing_default_of_a_parameter_that_a_group_leaves_out():
    says(
        only(declare("both", slots=lambda g, x: [[x, dict(y=x)], [dict(x=g.placeholder("z", str))]])),
        "missing-default",
        "parameter 'y' of 'a.both' has no default, but group 1 leaves it out",
        "give it one: y=None",
    )


def test_missing_default_of_an_optional_slot():
    says(
        only(declare("both", slots=lambda g, x: [[x, dict(y=optional(g.placeholder("z", str)))]], name="b")),
        "missing-default",
        "parameter 'y' of 'a.b' (method 'both') has no default, but its slot 'z' is optional",
        "give it one: y=None",
    )


def test_a_default_alone_does_not_make_a_slot_optional():
    g = declare("maybe", slots=lambda g, x: [[x, dict(y=x)]])
    assert g.lint() == []
    assert not g.lower().interfaces[0].groups[0][1].optional


def test_stream_without_generator():
    says(
        only(declare("take", outputs=[stream("o")])),
        "stream-without-generator",
        "'a.take' has the stream 'o' but is not a generator",
        "yield the frames, or annotate an iterator as its return type; for a single value drop stream(...)",
    )
    assert declare("iterate", Odd, outputs=[stream("o")]).lint() == []


def test_batch_generator():
    says(
        only(declare("frames", outputs=[stream("o")], batch=Batch(max=4))),
        "batch-generator",
        "'a.frames' is batched, but has the stream 'o'",
        "a batched method returns one list with a result per item; take batch= away, or the stream",
    )
    assert only(declare("frames", batch=Batch(max=4))).what == "'a.frames' is batched, but is a generator"


def test_bad_init():
    says(
        only(declare("take", Needy)),
        "bad-init",
        "role 'a': Needy(): missing a required argument: 'model'",
        "make init= fit the constructor",
    )
