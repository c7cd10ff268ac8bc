"""A user's own classes, functions and tables stand for roles in the simulator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from omni_flow.control.runtime.methods import Emit, emit
from omni_flow.testing.notation import parse_graph
from omni_flow.testing.reference import interpret
from omni_flow.testing.roles import Roles, UnknownRoleError
from omni_flow.testing.simulate import simulate
from omni_flow.testing.standins import Standins

GRAPH = parse_graph(
    """
    p
    param top = 3
    split: p -> y* | role=text
    join: collect(z) -> o, n | role=text
    up: y -> z
    say: o -> s*, t
    out o = o
    out n = n
    out s = s
    out t = t
    """
)


class Text:
    def split(self, ctx: Any, p: str) -> Iterator[str]:
        yield from p.split()[: ctx.params.top]

    async def join(self, z: list[str]) -> dict[str, Any]:
        return {"o": " ".join(z), "n": len(z)}


async def say(o: str) -> AsyncIterator[Emit]:
    for letter in o[:2]:
        yield emit(s=letter)
    yield emit(t=o.lower())


def up(y: str) -> str:
    if y == "!":
        raise ValueError(y)
    return y.upper()


def test_classes_functions_and_generators_give_what_they_would_in_a_deployment() -> None:
    roles = Roles(GRAPH, {"text": Text, "up": up, "say": say}, Standins(GRAPH, 0))
    result = interpret(GRAPH, {"p": "ab c d e"}, {}, roles)
    assert {name: delivered.values for name, delivered in result.outputs.items()} == {
        "o": ("AB C D",),
        "n": (3,),
        "s": ("A", "B"),
        "t": ("ab c d",),
    }
    report = simulate(GRAPH, schedules=40, inputs={"p": "ab c d e"}, roles={"text": Text, "up": up, "say": say})
    assert report.ok, report.show()


def test_what_a_role_raises_fails_its_activation() -> None:
    roles = Roles(GRAPH, {"text": Text, "up": up, "say": say}, Standins(GRAPH, 0))
    assert interpret(GRAPH, {"p": "a !"}, {}, roles).outcome == "failed"


def test_a_table_answers_for_an_interface() -> None:
    rows = [{"when": {"p": "q"}, "give": [["y", 1], ["y", 2]]}]
    report = simulate(GRAPH, schedules=10, inputs={"p": "q"}, roles={"split": rows})
    assert not report.divergences, report.show()


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(UnknownRoleError, match="no interface 'spilt'"):
        simulate(GRAPH, schedules=1, roles={"spilt": up})
