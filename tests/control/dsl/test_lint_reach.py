"""Each finding about what is never read or never runs, and the notes, with their exact words."""

# ruff: noqa: C408
from __future__ import annotations

from omni_flow.control.graph import Graph
from omni_flow.control.slots import collect, stream, window

from .linting import declare, only, says
from .roles import One


def test_unread_field_is_a_note():
    g = declare("two", outputs=["left"])
    g.placeholder("spare", str)
    g._interfaces[0]._role.interface("take", [[g._placeholders[0][1]]], ["o"])
    findings = g.lint()
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
    findings = g.lint()
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
    findings = [f for f in g.lint() if f.code == "unreachable-interface"]
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
    findings = g.lint()
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
