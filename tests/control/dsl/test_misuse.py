"""An argument of the wrong kind is refused at the call, by the argument's name."""

# ruff: noqa: C408
from __future__ import annotations

import pytest

from omni_flow.control.declare import DeclarationError
from omni_flow.control.graph import Graph, UnknownName
from omni_flow.control.slots import Batch, collect, count, last, optional, ordered, stream, window

from .roles import One

GRAPH = Graph("g")
X = GRAPH.placeholder("x", str)
BACK = GRAPH.feedback("back")
ROLE = GRAPH.role("a", One)
TYPE = "a type (Text, Bytes, Image, Audio, Tensor, ..., a Struct or model class)"
SLOT = "a field of the graph, or optional, collect, count, last, window, ordered of one"


class Policy:
    max_frames = 0

    def cut(self, frames, start, ended):
        return None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Graph(3), "name: expected a name, got 3"),
        (lambda: Graph(""), "name: expected a name, got ''"),
        (lambda: GRAPH.placeholder("p", str, stream=1), "stream: expected True or False, got 1"),
        (
            lambda: GRAPH.placeholder("p", "str"),
            "type: expected a type (Text, Bytes, Image, Audio, Tensor, ..., a Struct or model class), got 'str'",
        ),
        (
            lambda: GRAPH.placeholder("p", []),
            "type: expected a type (Text, Bytes, Image, Audio, Tensor, ..., a Struct or model class), got []",
        ),
        (lambda: GRAPH.param(None, int), "name: expected a name, got None"),
        (lambda: GRAPH.role("r", "One"), "cls: expected a class, or a function that makes an instance, got 'One'"),
        (lambda: GRAPH.role("r", One, init=[1]), "init: expected a dict of constructor arguments by name, got [1]"),
        (lambda: GRAPH.role("r", One, replicas=0), "replicas: expected an int of at least 1, got 0"),
        (lambda: GRAPH.role("r", One, stateful="no"), "stateful: expected True or False, got 'no'"),
        (lambda: GRAPH.use("other"), "other: expected another Graph, got 'other'"),
        (lambda: GRAPH.use(GRAPH), "other: expected another Graph, got <graph 'g'>"),
        (lambda: GRAPH.use(Graph("h"), bind=[X]), f"bind: expected a dict of placeholder to field, got {[X]!r}"),
        (lambda: GRAPH.use(Graph("h"), bind={"p": 3}), "bind['p']: expected a field of this graph, got 3"),
        (lambda: GRAPH.output(y="x"), f"y: expected {SLOT}, got 'x'"),
        (lambda: BACK.bind("x"), "field: expected an output of an interface, got 'x'"),
        (lambda: ROLE.interface(3, [[X]]), "name: expected a name, got 3"),
        (lambda: ROLE.interface("take", X), f"inputs: expected a list of groups, each a list of slots, got {X!r}"),
        (lambda: ROLE.interface("take", [X]), f"inputs[0]: expected a group: a list of fields and dicts, got {X!r}"),
        (lambda: ROLE.interface("take", [[X, "y"]]), f"inputs[0][1]: expected {SLOT}, got 'y'"),
        (lambda: ROLE.interface("take", [[X], [dict(x=3)]]), f"inputs[1][0]['x']: expected {SLOT}, got 3"),
        (lambda: ROLE.interface("take", [[X]], "y"), "outputs: expected a list of names and stream(\"name\"), got 'y'"),
        (lambda: ROLE.interface("take", [[X]], [X]), f"outputs[0]: expected a name, got {X!r}"),
        (
            lambda: ROLE.interface("take", [[X]], [dict(y="str")]),
            f"outputs[0]['y']: expected {TYPE}, got 'str'",
        ),
        (lambda: ROLE.interface("take", [[X]], max_iters=0), "max_iters: expected an int of at least 1, got 0"),
        (lambda: ROLE.interface("take", [[X]], retries=-1), "retries: expected an int of at least 0, got -1"),
        (lambda: ROLE.interface("take", [[X]], race=None), "race: expected True or False, got None"),
        (lambda: ROLE.interface("take", [[X]], on_error="x"), 'on_error: expected "fail" or "absent", got \'x\''),
        (lambda: ROLE.interface("take", [[X]], batch=16), "batch: expected a Batch(max=, wait_ms=), got 16"),
        (lambda: ROLE.interface("take", [[X]], batch=Batch(0)), "batch.max: expected an int of at least 1, got 0"),
        (
            lambda: ROLE.interface("take", [[X]], batch=Batch(1, -1)),
            "batch.wait_ms: expected milliseconds, 0 or more, got -1",
        ),
        (lambda: GRAPH.compile(credit=0), "credit: expected an int of at least 1, got 0"),
        (lambda: stream(None), "name: expected a name, got None"),
        (lambda: optional("x"), f"f: expected {SLOT}, got 'x'"),
        (lambda: collect(None), f"f: expected {SLOT}, got None"),
        (lambda: collect(X, over=3), "over: expected a stream field, or the name of one, got 3"),
        (lambda: count(X, 2.5), 'n: expected an int, a param, a field or "all", got 2.5'),
        (lambda: count(X, True), 'n: expected an int, a param, a field or "all", got True'),
        (lambda: window(X), "size: expected the frames of a window, or a policy, got None"),
        (lambda: window(X, 0), "size: expected an int of at least 1, got 0"),
        (lambda: window(X, 2, 0), "stride: expected an int of at least 1, got 0"),
        (lambda: window(X, 2, left_context=-1), "left_context: expected an int of at least 0, got -1"),
        (
            lambda: window(X, 2, policy=Policy()),
            "size: expected nothing beside a policy, which cuts by itself, got 2",
        ),
        (lambda: window(X, policy=Policy()), "policy.max_frames: expected an int of at least 1, got 0"),
        (
            lambda: window(X, policy=len),
            "policy: expected an object with max_frames and cut(frames, start, ended), got <built-in function len>",
        ),
        (
            lambda: ordered(collect(X)),
            "f: expected a field or a window: a join that closes the stream has nothing to order, got 'collect'",
        ),
        (
            lambda: last(collect(X)),
            "f: expected a field: last of a collect needs an interface between them "
            "(over= closes several levels at once), got 'collect'",
        ),
        (
            lambda: collect(optional(X)),
            "f: expected a field: write optional(collect(...)), not collect(optional(...)), got 'optional'",
        ),
        (
            lambda: window(ordered(X), 2),
            "f: expected a field: write ordered(window(...)), not window(ordered(...)), got 'ordered'",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(call, text):
    with pytest.raises(DeclarationError) as caught:
        call()
    assert str(caught.value) == text


def test_an_unknown_output_is_named_with_the_nearest():
    llm = Graph("g").role("llm", One).interface("take", [[X]], ["token"])
    with pytest.raises(UnknownName) as caught:
        _ = llm.tokn
    assert str(caught.value) == "llm.take has no output 'tokn'; did you mean 'token'?"
    with pytest.raises(UnknownName) as caught:
        _ = llm["zzz"]
    assert str(caught.value) == "llm.take has no output 'zzz'; it has 'token'"


def test_an_unknown_output_of_a_used_graph_is_named():
    inner, g = Graph("inner"), Graph("g")
    inner.output(code=inner.placeholder("x", str))
    with pytest.raises(UnknownName) as caught:
        _ = g.use(inner, name="u").cod
    assert str(caught.value) == "u (graph 'inner') has no output 'cod'; did you mean 'code'?"
