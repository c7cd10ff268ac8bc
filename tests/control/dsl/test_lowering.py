"""How declarations become the neutral form: names, joins, loops, uses."""

# ruff: noqa: C408
from __future__ import annotations

import pytest

from omni_flow.control.findings import GraphError
from omni_flow.control.graph import Graph
from omni_flow.control.slots import Batch, collect, count, last, optional, ordered, stream, window
from omni_flow.control.spec import FieldRef, Join, ParamRef, SlotSpec
from omni_flow.control.types import Scalar, Text

from .roles import One, Typed


def slots(graph: Graph, interface: str) -> list[SlotSpec]:
    spec = next(i for i in graph.lower().interfaces if i.name == interface)
    return [slot for group in spec.groups for slot in group]


def streaming() -> tuple[Graph, object]:
    g = Graph("g")
    x = g.placeholder("x", str)
    return g, g.role("a", One).interface("frames", inputs=[[x]], outputs=[stream("y")]).y


def test_fields_are_named_by_role_interface_and_output():
    g = Graph("g")
    x = g.placeholder("x", str)
    a = g.role("a", One).interface("take", inputs=[[x]], outputs=["out"], name="front")
    assert (x.id, a.out.id, a["out"].id) == ("x", "a.front.out", "a.front.out")


def test_an_output_may_be_called_like_anything():
    g = Graph("g")
    a = g.role("a", One).interface("two", inputs=[[g.placeholder("x", str)]], outputs=["name", "role"])
    assert (a.name.id, a.role.id) == ("a.two.name", "a.two.role")


def test_a_field_binds_to_the_parameter_of_its_name_and_a_dict_by_key():
    g = Graph("g")
    x, y = g.placeholder("x", str), g.placeholder("y", str)
    g.role("a", One).interface("both", inputs=[[x, dict(y=x)], [dict(x=y, y=x)]], outputs=["z"])
    assert [(s.param, s.field) for s in slots(g, "a.both")] == [("x", "x"), ("y", "x"), ("x", "y"), ("y", "x")]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda y, g: optional(y), dict(optional=True)),
        (lambda y, g: collect(y), dict(join=Join.COLLECT)),
        (lambda y, g: optional(collect(y)), dict(join=Join.COLLECT, optional=True)),
        (lambda y, g: last(y, over="y"), dict(join=Join.LAST, over="y")),
        (lambda y, g: collect(y, over=y), dict(join=Join.COLLECT, over="a.frames.y")),
        (lambda y, g: count(y, 3), dict(join=Join.COUNT, n=3)),
        (lambda y, g: count(y, "all"), dict(join=Join.COUNT, n="all")),
        (lambda y, g: count(y, "n"), dict(join=Join.COUNT, n=ParamRef("n"))),
        (lambda y, g: count(y, g.param("n", int, 2)), dict(join=Join.COUNT, n=ParamRef("n"))),
        (lambda y, g: count(y, g.placeholder("k", int)), dict(join=Join.COUNT, n=FieldRef("k"))),
        (lambda y, g: ordered(y), dict(ordered=True)),
        (lambda y, g: window(y, 4), dict(join=Join.WINDOW, size=4, stride=4)),
        (lambda y, g: window(y, 4, 2, 1), dict(join=Join.WINDOW, size=4, stride=2, left=1)),
        (lambda y, g: ordered(window(y, 4, stride=2)), dict(join=Join.WINDOW, size=4, stride=2, ordered=True)),
    ],
)
def test_each_input_policy_lowers_to_its_slot(make, expected):
    g, y = streaming()
    g.role("b", One).interface("many", inputs=[[dict(v=make(y, g))]], outputs=["z"])
    (slot,) = slots(g, "b.many")
    assert slot == SlotSpec(field="a.frames.y", param="v", where=slot.where, **expected)


def test_a_window_with_a_policy_takes_its_size_from_it():
    class Pairs:
        max_frames = 2

        def cut(self, frames, start, ended):
            return start + 2 if len(frames) >= start + 2 else None

    g, y = streaming()
    policy = Pairs()
    g.role("b", One).interface("many", inputs=[[window(y, policy=policy, left_context=1)]], outputs=["z"])
    (slot,) = slots(g, "b.many")
    assert (slot.size, slot.left, slot.policy, slot.param) == (2, 1, policy, "y")


def test_interface_options_are_carried():
    g = Graph("g")
    role = g.role("a", One, init={}, replicas=3, balance="session", stateful=True)
    role.interface(
        "take",
        [[g.placeholder("x", str)]],
        ["o"],
        race=True,
        retries=2,
        on_error="absent",
        batch=Batch(max=4, wait_ms=1),
    )
    spec = g.lower()
    (interface,) = spec.interfaces
    assert (interface.race, interface.retries, interface.on_error) == (True, 2, "absent")
    assert interface.batch == Batch(4, 1)
    assert (spec.roles[0].replicas, spec.roles[0].balance, spec.roles[0].stateful) == (3, "session", True)


def test_a_feedback_is_the_back_edge_of_a_loop():
    g = Graph("g")
    x, back = g.placeholder("x", str), g.feedback("back")
    step = g.role("a", One).interface("take", [[x], [dict(x=back)]], ["x"], max_iters=4)
    back.bind(step.x)
    g.output(x=last(step.x))
    assert g.lower().feedback == {"back": "a.take.x"}
    graph = g.compile()
    assert graph.plan.interfaces[0].max_iters == 4


def test_types_come_from_the_method_or_from_the_declaration():
    g = Graph("g")
    text = g.placeholder("text", Text)
    role = g.role("a", Typed)
    g.role("b", One).interface("two", [[dict(x=text)]], [dict(left=int), stream("right", str)])
    role.interface("upper", [[text]], ["o"])
    role.interface("words", [[text]], [stream("o")])
    role.interface("tokens", [[text]], [stream("o")])
    role.interface("batched", [[text]], ["o"], batch=Batch(max=2))
    types = {o.field: o.type for i in g.lower().interfaces for o in i.outputs}
    assert types == {
        "b.two.left": Scalar(int),
        "b.two.right": Text(),
        "a.upper.o": Text(),
        "a.words.o": Text(),
        "a.tokens.o": Text(),
        "a.batched.o": Text(),
    }


def inner_graph(init: dict | None = None) -> Graph:
    g = Graph("inner")
    prompt = g.placeholder("prompt", Text)
    g.param("limit", int, 3)
    words = g.role("split", Typed).interface("words", [[dict(text=prompt)]], [stream("word")])
    long = g.role("enc", One, init=init).interface("take", [[dict(x=words.word)]], ["code"])
    g.output(code=long.code, first=count(long.code, g.placeholder("n", int)), echo=prompt)
    return g


def test_use_inlines_another_graph_under_its_name():
    g = Graph("outer")
    p, n = g.placeholder("p", Text), g.placeholder("k", int)
    used = g.use(inner_graph(), name="e", bind={"prompt": p, "n": n})
    g.role("z", One).interface("many", [[dict(codes=collect(used.code), first=used.first, echo=used.echo)]], ["o"])
    spec = g.lower()
    assert [i.name for i in spec.interfaces] == ["z.many", "e/split.words", "e/enc.take"]
    assert [(s.param, s.field, s.join, s.n) for s in slots(g, "z.many")] == [
        ("codes", "e/enc.take.code", Join.COLLECT, "all"),
        ("first", "e/enc.take.code", Join.COUNT, FieldRef("k")),
        ("echo", "p", Join.PLAIN, "all"),
    ]
    assert slots(g, "e/split.words")[0].field == "p"
    assert slots(g, "e/enc.take")[0].field == "e/split.words.word"
    assert [(r.name) for r in spec.roles] == ["z", "split", "enc"]
    assert [(u.name, u.graph, u.bind, u.unbound) for u in spec.uses] == [("e", "inner", {"prompt": "p", "n": "k"}, ())]
    assert [p.name for p in spec.params] == ["limit"]


def test_uses_nest_and_two_uses_share_their_roles():
    middle = Graph("middle")
    q, k = middle.placeholder("q", Text), middle.param("limit", int, 3)
    inner = middle.use(inner_graph(), name="i", bind={"prompt": q, "n": middle.placeholder("n", int)})
    middle.output(code=inner.code)
    g = Graph("outer")
    p, n = g.placeholder("p", Text), g.placeholder("n", int)
    one, two = (g.use(middle, name=name, bind={"q": p, "n": n}) for name in ("a", "b"))
    g.output(one=one.code, two=collect(two.code))
    graph = g.compile()
    assert list(graph.roles) == ["split", "enc"]
    assert list(graph.interfaces) == ["a/i/split.words", "a/i/enc.take", "b/i/split.words", "b/i/enc.take"]
    assert graph.spec.outputs["two"].field == "b/i/enc.take.code"
    assert k.name in graph.params


def test_roles_of_one_name_but_other_init_are_not_shared():
    g = Graph("outer")
    p, n = g.placeholder("p", Text), g.placeholder("n", int)
    a = g.use(inner_graph(), name="a", bind={"prompt": p, "n": n})
    b = g.use(inner_graph({"size": 2}), name="b", bind={"prompt": p, "n": n})
    g.output(a=a.code, b=b.code)
    assert [r.name for r in g.lower().roles] == ["split", "enc", "b/enc"]
    assert {i.name: i.role for i in g.lower().interfaces}["b/enc.take"] == "b/enc"


def test_a_loop_inside_a_used_graph_keeps_its_back_edge():
    inner = Graph("inner")
    x, back = inner.placeholder("x", str), inner.feedback("back")
    step = inner.role("a", One).interface("take", [[x], [dict(x=back)]], ["x"], max_iters=4)
    back.bind(step.x)
    inner.output(x=last(step.x))
    g = Graph("outer")
    g.output(x=g.use(inner, name="u", bind={"x": g.placeholder("p", str)}).x)
    graph = g.compile()
    assert graph.spec.feedback == {"u/back": "u/a.take.x"}
    assert graph.spec.outputs["x"].join is Join.LAST


def test_a_use_bound_later_sees_what_was_declared_later():
    inner, g = Graph("inner"), Graph("outer")
    x = inner.placeholder("x", str)
    used = g.use(inner, bind={"x": g.placeholder("p", str)})
    inner.output(o=inner.role("a", One).interface("take", [[x]], ["o"]).o)
    g.output(o=used.o)
    assert g.compile().spec.outputs["o"].field == "inner/a.take.o"


def test_graphs_that_use_each_other_are_refused():
    one, two = Graph("one"), Graph("two")
    one.use(two)
    two.use(one)
    with pytest.raises(GraphError, match="graphs use each other in a circle: 'one' -> 'two' -> 'one'"):
        one.compile()


@pytest.mark.parametrize("by_field", [True, False])
def test_over_closes_an_outer_stream_and_all_inside_it(by_field):
    g, y = streaming()
    z = g.role("b", One).interface("frames", [[dict(x=y)]], [stream("z")]).z
    g.output(o=g.role("c", One).interface("take", [[dict(x=collect(z, over=y if by_field else "y"))]], ["o"]).o)
    assert g.compile().plan.interfaces[2].scope == ()
