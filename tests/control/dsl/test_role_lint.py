"""Each finding about names, reach, roles and types, with its exact words. One graph for one finding."""

# ruff: noqa: C408
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pytest

from omni_flow.control.findings import Finding, GraphError
from omni_flow.control.graph import Graph
from omni_flow.control.slots import Batch, collect, count, last, optional, stream, window
from omni_flow.control.types import Audio, Image

from .roles import One, Typed

if TYPE_CHECKING:
    from decimal import Decimal


class Odd:
    """Methods that lint has something to say about."""

    def only(self, x, /):
        return x

    def context(self, ctx, x):
        return x

    def late(self, x: Decimal):
        return x

    def batched(self, text: str) -> str:
        return text

    def frames(self, sound: Annotated[np.ndarray, Audio(24_000)]) -> np.ndarray:
        return sound

    def iterate(self, x) -> Iterator[int]:
        return iter((x,))


class Needy:
    def __init__(self, model: str) -> None:
        self.model = model

    def take(self, x):
        return x


def made(**options) -> Callable[[], One]:
    """A factory whose class only its annotation tells."""

    def make() -> One:
        return One()

    return make


def lint(graph: Graph) -> list[Finding]:
    return graph.lint()


def only(graph: Graph) -> Finding:
    """The one finding of a graph, which also compiles exactly if that is a note."""
    findings = lint(graph)
    assert len(findings) == 1, [str(f) for f in findings]
    if findings[0].level == "note":
        assert graph.compile().notes == tuple(findings)
    else:
        with pytest.raises(GraphError) as caught:
            graph.compile()
        assert caught.value.findings == tuple(findings)
    return findings[0]


def says(finding: Finding, code: str, what: str, mend: str) -> None:
    assert (finding.code, finding.what, finding.mend) == (code, what, mend)
    assert finding.where.startswith(f"{__file__}:")


def declare(method: str, cls: type = One, slots: object = None, outputs: object = ("o",), **options) -> Graph:
    """A placeholder x, one interface on it, all its outputs given to the client."""
    g = Graph("g")
    x = g.placeholder("x", str)
    a = g.role("a", cls).interface(method, [[x]] if slots is None else slots(g, x), list(outputs), **options)
    g.output(**{name: a[name] for name in dir(a)})
    return g


def test_a_clean_graph_has_no_finding():
    assert lint(declare("take")) == []


def test_no_such_method():
    says(
        only(declare("tale")),
        "no-such-method",
        "class One of role 'a' has no method 'tale'",
        "did you mean 'take'?",
    )
    assert only(declare("zzz", Needy2)).mend == "its methods: 'take'"


class Needy2:
    def take(self, x):
        return x


def test_the_class_behind_a_factory_is_known_by_its_annotation():
    g = Graph("g")
    x = g.placeholder("x", str)
    g.output(o=g.role("a", made()).interface("tale", [[x]], ["o"]).o)
    assert only(g).code == "no-such-method"


def test_a_role_whose_class_cannot_be_known_is_not_judged():
    g = Graph("g")
    g.output(o=g.role("a", lambda: One()).interface("zzz", [[g.placeholder("x", str)]], ["o"]).o)
    assert lint(g) == []


def test_unknown_parameter():
    g = declare("maybe", slots=lambda g, x: [[x, dict(yy=x)]])
    says(
        only(g),
        "unknown-parameter",
        "'a.maybe' has no parameter 'yy', to which 'x' is bound",
        "bind by name: dict(y=...); its parameters: 'x', 'y'",
    )


def test_keyword_arguments_take_any_parameter():
    assert lint(declare("many", slots=lambda g, x: [[dict(a=x, b=x)]])) == []


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
    assert lint(declare("context", Odd)) == []


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
    assert lint(g) == []
    assert not g.lower().interfaces[0].groups[0][1].optional


def test_stream_without_generator():
    says(
        only(declare("take", outputs=[stream("o")])),
        "stream-without-generator",
        "'a.take' has the stream 'o' but is not a generator",
        "yield the frames, or annotate an iterator as its return type; for a single value drop stream(...)",
    )
    assert lint(declare("iterate", Odd, outputs=[stream("o")])) == []


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


def typed(method: str, cls: type, type_: object, slot: Callable = lambda f: f, param: str = "text", **options) -> Graph:
    g = Graph("g")
    x = g.placeholder("x", type_)
    g.output(o=g.role("a", cls).interface(method, [[{param: slot(x)}]], ["o"], **options).o)
    return g


def test_type_mismatch_of_a_parameter():
    says(
        only(typed("upper", Typed, bytes)),
        "type-mismatch",
        "'a.upper': parameter 'text' is Text, but 'x' gives Bytes",
        "put a role between them that converts, or change the annotation",
    )


def test_type_mismatch_of_sample_rates():
    finding = only(typed("frames", Odd, Audio(16_000), param="sound"))
    assert finding.what == "'a.frames': parameter 'sound' is Audio(24000), but 'x' gives Audio(16000)"


def test_type_mismatch_of_a_value_for_a_list():
    says(
        only(typed("join", Typed, str, param="words")),
        "type-mismatch",
        "'a.join': parameter 'words' is list[Text], but 'x' gives Text",
        "collect(x), count or window make a list of a stream; else annotate one value",
    )


def test_a_collected_stream_is_a_list_of_its_frames():
    def graph(join: Callable) -> Graph:
        g = Graph("g")
        words = g.role("w", Typed).interface("words", [[dict(text=g.placeholder("x", str))]], [stream("o")])
        g.output(o=g.role("a", Typed).interface("join", [[dict(words=join(words.o))]], ["o"]).o)
        return g

    for join in (collect, lambda f: count(f, 2), lambda f: window(f, 3)):
        assert lint(graph(join)) == []
    assert only(graph(last)).what == "'a.join': parameter 'words' is list[Text], but 'w.words.o' gives Text"


def test_type_mismatch_of_a_batched_method():
    findings = lint(typed("batched", Odd, str, batch=Batch(max=2)))
    assert [(f.code, f.what, f.mend) for f in findings] == [
        (
            "type-mismatch",
            "'a.batched': parameter 'text' is Text, but 'x' gives list[Text]",
            "a batched method receives lists: annotate it list[Text]",
        ),
        (
            "type-mismatch",
            "'a.batched' is batched, but returns Text",
            "return a list with one result per item: list[Text]",
        ),
    ]
    assert lint(typed("batched", Typed, str, batch=Batch(max=2))) == []


def test_type_mismatch_of_a_threshold():
    g = Graph("g")
    x = g.placeholder("x", str)
    y = g.role("a", One).interface("frames", [[x]], [stream("y")]).y
    g.output(o=g.role("b", One).interface("take", [[dict(x=count(y, g.param("n", str, "2")))]], ["o"]).o)
    says(
        only(g),
        "type-mismatch",
        "'b.take': count(a.frames.y, n) takes n from 'n', which is Text, not int",
        "take n from an int",
    )


def test_type_mismatch_of_a_bound_placeholder():
    inner, g = Graph("inner"), Graph("g")
    inner.output(o=inner.role("a", One).interface("take", [[dict(x=inner.placeholder("p", Image))]], ["o"]).o)
    g.output(o=g.use(inner, name="u", bind={"p": g.placeholder("x", str)}).o)
    says(
        only(g),
        "type-mismatch",
        "use 'u' binds Text field 'x' to Image placeholder 'p'",
        "put a role between them that converts",
    )


def test_unresolved_annotation_is_a_note():
    finding = only(declare("late", Odd))
    says(
        finding,
        "unresolved-annotation",
        "'a.late': annotations could not be evaluated, so their types are not checked: 'x'",
        "import what they name outside of TYPE_CHECKING",
    )
    assert finding.level == "note"


def test_duplicate_names():
    g = declare("take")
    g.placeholder("x", str)
    g.feedback("x").bind(g.role("a", One).interface("take", [[g.placeholder("q", str)]], ["o"], name="zz").o)
    g.param("n", int)
    g.param("n", int)
    g._interfaces[0]._role.interface("take", [[g.placeholder("y", str)]], ["o"])
    g.output(o=g.placeholder("z", str))
    whats = [f.what for f in lint(g) if f.code == "duplicate-name"]
    assert whats == [
        "graph 'g': output 'o' is declared twice",
        "graph 'g': placeholder 'x' is declared twice",
        "graph 'g': param 'n' is declared twice",
        "graph 'g': role 'a' is declared twice",
        "graph 'g': interface 'a.take' is declared twice",
        "graph 'g': feedback 'x' is declared twice, first as a placeholder",
    ]
    assert "two-producers" not in {f.code for f in lint(g)}


def test_a_feedback_bound_twice_and_a_use_named_twice_are_duplicates():
    g = declare("take")
    a = g._interfaces[0]
    back = g.feedback("back")
    back.bind(a.o)
    back.bind(a.o)
    for _ in range(2):
        g.use(Graph("h"), name="h")
    whats = [f.what for f in lint(g) if f.code == "duplicate-name"]
    assert whats == ["graph 'g': binding of feedback 'back' is declared twice", "graph 'g': use 'h' is declared twice"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda g: g.output(y=g.placeholder("my text", str)),
            "placeholder 'my text' is not a name that role code can use",
        ),
        (lambda g: g.param("class", int), "param 'class' is not a name that role code can use"),
        (lambda g: g.use(Graph("h-1")), "use 'h-1' is not a name that role code can use"),
        (
            lambda g: g.output(y=g.role("r", One).interface("take", [[g._placeholders[0][1]]], ["o"], name="1st").o),
            "interface 'r.1st' is not a name that role code can use",
        ),
        (
            lambda g: g.output(y=g.role("r", One).interface("take", [[g._placeholders[0][1]]], ["a.b"])["a.b"]),
            "output of 'r.take' 'a.b' is not a name that role code can use",
        ),
    ],
)
def test_invalid_name(change, what):
    g = declare("take")
    change(g)
    says(
        only(g),
        "invalid-name",
        what,
        "take letters, digits and _, not beginning with a digit, and no keyword of Python",
    )


def test_unknown_balance():
    g = Graph("g")
    x = g.placeholder("x", str)
    g.output(o=g.role("a", One, balance="best").interface("take", [[x]], ["o"]).o)
    says(
        only(g),
        "unknown-balance",
        "role 'a' asks for balance 'best'",
        "take one of round_robin, random, least_loaded, session, cache_aware, weighted",
    )


def test_no_outputs():
    g = Graph("g")
    g.role("a", One).interface("take", [[g.placeholder("x", str)]], ["o"])
    findings = lint(g)
    says(
        findings[0],
        "no-outputs",
        "graph 'g' has no output, so the client would receive nothing",
        "name what the client receives: graph.output(name=field)",
    )
    assert [f.code for f in findings] == ["no-outputs", "unread-field"]


def test_a_graph_that_only_acts_needs_no_output():
    g = Graph("g")
    g.role("a", One).interface("take", [[g.placeholder("x", str)]])
    assert lint(g) == []


def test_unread_field_is_a_note():
    g = declare("two", outputs=["left"])
    g.placeholder("spare", str)
    g._interfaces[0]._role.interface("take", [[g._placeholders[0][1]]], ["o"])
    findings = lint(g)
    assert [(f.code, f.level, f.what, f.mend) for f in findings] == [
        ("unread-field", "note", "nobody reads placeholder 'spare'", "bind it to a slot, or remove it"),
        (
            "unread-field",
            "note",
            "nobody reads 'a.take.o'",
            "bind it to a slot or to graph.output, or remove it from outputs",
        ),
    ]


def test_unused_role_is_a_note():
    g = declare("take")
    g.role("spare", One)
    says(
        only(g),
        "unused-role",
        "role 'spare' has no interface, so it would never be called",
        "declare role.interface(...), or remove it",
    )


def test_race_is_a_note():
    says(
        only(declare("take", race=True)),
        "race",
        "'a.take' is a race: its result may depend on timing",
        "drop race=True if the declared order of groups will do",
    )


def test_a_policy_that_looks_at_a_clock_is_a_note():
    class Timed:
        max_frames = 4
        timed = True

        def cut(self, frames, start, ended):
            return None

    g = Graph("g")
    y = g.role("a", One).interface("frames", [[g.placeholder("x", str)]], [stream("y")]).y
    g.output(o=g.role("b", One).interface("take", [[dict(x=window(y, policy=Timed()))]], ["o"]).o)
    says(
        only(g),
        "race",
        "'b.take' cuts 'a.frames.y' by time: its result may depend on timing",
        "use a policy that looks at frames only",
    )


def test_spooled_reader_is_a_note():
    g = Graph("g")
    y = g.role("a", One).interface("frames", [[g.placeholder("x", str)]], [stream("y")]).y
    total = g.role("s", One).interface("take", [[dict(x=collect(y))]], ["o"])
    g.output(o=g.role("b", One).interface("both", [[dict(x=y, y=total.o)]], ["o"]).o)
    findings = lint(g)
    assert {f.level for f in findings} == {"note"}
    says(
        next(f for f in findings if "b.both" in f.what),
        "spooled-reader",
        "'b.both' can only go on when 'a.frames.y' goes on, so it may hold that whole stream",
        "nothing is wrong; to bound its memory, let it not wait for a summary of the stream",
    )


def test_retries_under_a_stream_is_a_note():
    g = Graph("g")
    y = g.role("a", One).interface("frames", [[g.placeholder("x", str)]], [stream("y")]).y
    g.output(o=g.role("b", One).interface("take", [[dict(x=y)]], ["o"], retries=1).o)
    says(
        only(g),
        "retries-keep-stream",
        "'b.take' is replayable, so the senders of 'a.frames.y' keep the whole stream until the request ends",
        "drop retries= if memory matters",
    )


def test_unreachable_interface():
    g = declare("take")
    back = g.feedback("back")
    loop = g.role("l", One).interface("take", [[dict(x=back)]], ["x"], max_iters=2)
    back.bind(loop.x)
    after = g.role("m", One).interface("take", [[loop.x]], ["o"])
    g.output(more=after.o)
    findings = [f for f in lint(g) if f.code == "unreachable-interface"]
    says(
        findings[0],
        "unreachable-interface",
        "'l.take' can never run: group 0, which waits for 'back'",
        "feed it, directly or through others, from a placeholder",
    )
    assert findings[1].what == "'m.take' can never run: group 0, which waits for 'l.take.x'"


def test_group_never_ready():
    g = Graph("g")
    x = g.placeholder("x", str)
    nothing = g.role("n", One).interface("take", [], ["o"])
    g.output(o=g.role("a", One).interface("maybe", [[x, dict(y=nothing.o)], [x]], ["o"]).o)
    findings = lint(g)
    assert [(f.code, f.what, f.mend) for f in findings if "never" in f.what] == [
        (
            "unreachable-interface",
            "'n.take' can never run: it has no groups",
            "feed it, directly or through others, from a placeholder",
        ),
        (
            "group-never-ready",
            "'a.maybe' can never run on group 0, which waits for 'n.take.o'",
            "remove the group, or feed what it waits for from a placeholder",
        ),
    ]


def test_foreign_field():
    g, other = declare("take"), Graph("other")
    theirs = other.placeholder("theirs", str)
    g.output(y=theirs)
    says(
        only(g),
        "foreign-field",
        "field 'theirs' belongs to graph 'other', not to 'g'",
        "inline that graph with use(...) and read its output from the handle",
    )


def test_unknown_placeholder_in_bind():
    inner, g = Graph("inner"), declare("take")
    inner.output(o=inner.role("a", One).interface("take", [[dict(x=inner.placeholder("p", str))]], ["o"]).o)
    x = g._placeholders[0][1]
    g.output(y=g.use(inner, name="u", bind={"p": x, "q": x}).o)
    says(
        only(g),
        "unknown-placeholder",
        "use 'u' binds 'q', which graph 'inner' does not have as a placeholder",
        "its placeholders: 'p'",
    )


def test_param_conflict():
    inner, g = Graph("inner"), declare("take")
    inner.param("n", int, 2)
    inner.output(o=inner.role("a", One).interface("take", [[dict(x=inner.placeholder("p", str))]], ["o"]).o)
    g.param("n", int, 3)
    g.output(y=g.use(inner, name="u", bind={"p": g._placeholders[0][1]}).o)
    says(
        only(g),
        "param-conflict",
        "param 'n' is int = 3 in graph 'g' and int = 2 in graph 'inner' (use 'u')",
        "rename one, or make them equal",
    )


def test_all_findings_come_at_once():
    g = Graph("g")
    x, back = g.placeholder("x", str), g.feedback("back")
    a = g.role("a", One).interface("tale", [[x]], ["o"])
    g.role("b", One, balance="best").interface("take", [[dict(y=a.o)], [dict(x=back)]], ["o"])
    codes = {f.code for f in lint(g)}
    assert {"no-outputs", "unknown-balance", "unbound-feedback", "no-such-method", "unknown-parameter"} <= codes
    with pytest.raises(GraphError) as caught:
        g.compile()
    assert {f.code for f in caught.value.findings} == {f.code for f in lint(g) if f.level == "error"}
    assert "no-such-method" in str(caught.value)
