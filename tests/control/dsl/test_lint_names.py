"""Each finding about names, and about what another graph brings along, with its exact words."""

# ruff: noqa: C408
from __future__ import annotations

import pytest

from omni_flow.control.findings import GraphError
from omni_flow.control.graph import Graph

from .linting import declare, only, says
from .roles import One


def test_duplicate_names():
    g = declare("take")
    g.placeholder("x", str)
    g.feedback("x").bind(g.role("a", One).interface("take", [[g.placeholder("q", str)]], ["o"], name="zz").o)
    g.param("n", int)
    g.param("n", int)
    g._interfaces[0]._role.interface("take", [[g.placeholder("y", str)]], ["o"])
    g.output(o=g.placeholder("z", str))
    whats = [f.what for f in g.lint() if f.code == "duplicate-name"]
    assert whats == [
        "graph 'g': output 'o' is declared twice",
        "graph 'g': placeholder 'x' is declared twice",
        "graph 'g': param 'n' is declared twice",
        "graph 'g': role 'a' is declared twice",
        "graph 'g': interface 'a.take' is declared twice",
        "graph 'g': feedback 'x' is declared twice, first as a placeholder",
    ]
    assert "two-producers" not in {f.code for f in g.lint()}


def test_a_feedback_bound_twice_and_a_use_named_twice_are_duplicates():
    g = declare("take")
    a = g._interfaces[0]
    back = g.feedback("back")
    back.bind(a.o)
    back.bind(a.o)
    for _ in range(2):
        g.use(Graph("h"), name="h")
    whats = [f.what for f in g.lint() if f.code == "duplicate-name"]
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
    findings = g.lint()
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
    assert g.lint() == []


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
    codes = {f.code for f in g.lint()}
    assert {"no-outputs", "unknown-balance", "unbound-feedback", "no-such-method", "unknown-parameter"} <= codes
    with pytest.raises(GraphError) as caught:
        g.compile()
    assert {f.code for f in caught.value.findings} == {f.code for f in g.lint() if f.level == "error"}
    assert "no-such-method" in str(caught.value)
