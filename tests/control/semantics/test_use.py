"""Row 30 through the DSL: a graph used twice, and inside another, shares roles but no bucket."""

from __future__ import annotations

from collections.abc import Iterator

from omni_flow import Graph, collect, stream
from omni_flow.testing import Given, interpret, simulate
from omni_flow.testing.facts import Activation, show_path


class Letters:
    def split(self, word: str) -> Iterator[str]:
        yield from word

    def upper(self, letter: str) -> str:
        return letter.upper()


class Joiner:
    def join(self, first: list[str], second: list[str]) -> str:
        return "".join(first) + "-" + "".join(second)


def letters_graph(name: str) -> Graph:
    graph = Graph(name)
    word = graph.placeholder("word", str)
    role = graph.role("letters", Letters)
    letter = role.interface("split", inputs=[[word]], outputs=[stream("letter")])
    graph.output(upper=role.interface("upper", inputs=[[letter.letter]], outputs=["upper"]).upper)
    return graph


def test_row_30_two_uses_of_a_graph_share_replicas_and_mix_nothing() -> None:
    graph = Graph("twice")
    left, right = graph.placeholder("left", str), graph.placeholder("right", str)
    one = graph.use(letters_graph("letters"), name="one", bind={"word": left})
    two = graph.use(letters_graph("letters"), name="two", bind={"word": right})
    joiner = graph.role("joiner", Joiner)
    slots = {"first": collect(one.upper), "second": collect(two.upper)}
    graph.output(joined=joiner.interface("join", inputs=[[slots]], outputs=["joined"]).joined, left=one.upper)
    compiled = graph.compile()
    assert set(compiled.roles) == {"letters", "joiner"}
    inputs = {"left": "abc", "right": "xy"}

    def behave(activation: Activation) -> Given:
        name = activation.interface.rpartition(".")[2]
        values = activation.inputs
        if name == "split":
            return Given([("letter", letter) for letter in values["word"]])
        if name == "upper":
            return Given([("upper", values["letter"].upper())])
        return Given([("joined", "".join(values["first"]) + "-" + "".join(values["second"]))])

    result = interpret(compiled.spec, inputs, {}, behave)
    assert result.outputs["joined"].values == ("ABC-XY",)
    assert result.outputs["left"].values == ("A", "B", "C")
    ran = [show_path(path) for name, path in result.runs if name == "two/letters.upper"]
    assert ran == ["two/letters.split.letter#0", "two/letters.split.letter#1"]
    report = simulate(compiled, schedules=200, inputs=inputs, roles={"letters": Letters, "joiner": Joiner})
    assert report.ok, report.show()
