from __future__ import annotations

from typing import Any

import pytest

from omni_flow import Graph, Text
from omni_flow.cli.errors import UserError
from omni_flow.cli.flags import flags_of, read_inputs, read_params, read_replicas


class Echo:
    def say(self, a: str = "", b: str = "", out: str = "", c: str = "") -> str:
        return a + b


def compiled(**required: bool) -> Any:
    graph = Graph("g")
    fields = [graph.placeholder(name, Text, required=required.get(name, False)) for name in ("a", "b", "out")]
    graph.param("n", int, 3)
    graph.param("name", str, "x")
    done = graph.role("echo", Echo).interface("say", inputs=[[f] for f in fields], outputs=["x"])
    graph.output(x=done.x)
    return graph.compile()


def read(given: list[str | None], **required: bool) -> Any:
    return read_inputs(flags_of(compiled(**required), ["--out"]), given)


def test_each_placeholder_is_a_flag_and_gives_way_to_the_commands_own() -> None:
    assert [flag.name for flag in flags_of(compiled(), ["--out"])] == ["--a", "--b", "--input-out"]


def test_what_is_given_is_sent_and_the_rest_is_not() -> None:
    assert read(["x", None, None]).whole == {"a": "x"}


@pytest.mark.parametrize(
    ("given", "required", "message"),
    [
        ([None, None, None], {}, "nothing to send\ngive one or more of --a TEXT, --b TEXT, --input-out TEXT"),
        (["x", None, None], {"b": True}, "--b is required\ngive one or more of --a TEXT, --b TEXT, --input-out TEXT"),
        (
            [None, None, "x"],
            {"a": True, "b": True},
            "--a and --b are required\ngive one or more of --a TEXT, --b TEXT, --input-out TEXT",
        ),
        (["-", "-", None], {}, "--a and --b both read stdin\ngive all but one of them otherwise"),
    ],
)
def test_inputs_that_cannot_be_sent_are_refused(
    given: list[str | None], required: dict[str, bool], message: str
) -> None:
    with pytest.raises(UserError) as info:
        read(given, **required)
    assert str(info.value) == message


def test_params_are_read_by_their_type() -> None:
    assert read_params(compiled(), ["n=7", "name=7"]) == {"n": 7, "name": "7"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("n", "--param: expected name=value, got 'n'"),
        ("nmae=x", "--param: the graph has no param 'nmae'\ndid you mean name?"),
        ("n=x", "--param n: expected int as JSON, got 'x'\nExpecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_wrong_param_is_refused(given: str, message: str) -> None:
    with pytest.raises(UserError) as info:
        read_params(compiled(), [given])
    assert str(info.value) == message


def test_replicas_are_read_by_role() -> None:
    assert read_replicas(compiled(), ["echo=2"]) == {"echo": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ehco=2", "--replicas: the graph has no role 'ehco'\ndid you mean echo?"),
        ("echo=0", "--replicas echo: expected a number of at least 1, got '0'"),
        ("echo=two", "--replicas echo: expected a number of at least 1, got 'two'"),
    ],
)
def test_a_wrong_number_of_replicas_is_refused(given: str, message: str) -> None:
    with pytest.raises(UserError) as info:
        read_replicas(compiled(), [given])
    assert str(info.value) == message
