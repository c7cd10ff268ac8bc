"""Each finding about types, with its exact words."""

# ruff: noqa: C408
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import numpy as np

from omni_flow.control.graph import Graph
from omni_flow.control.slots import Batch, collect, count, last, stream, window
from omni_flow.control.types import Audio, Image

from .linting import declare, only, says
from .roles import One, Typed

if TYPE_CHECKING:
    from decimal import Decimal


class Odd:
    """Methods whose types lint has something to say about."""

    def late(self, x: Decimal):
        return x

    def batched(self, text: str) -> str:
        return text

    def frames(self, sound: Annotated[np.ndarray, Audio(24_000)]) -> np.ndarray:
        return sound


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
        assert graph(join).lint() == []
    assert only(graph(last)).what == "'a.join': parameter 'words' is list[Text], but 'w.words.o' gives Text"


def test_type_mismatch_of_a_batched_method():
    findings = typed("batched", Odd, str, batch=Batch(max=2)).lint()
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
    assert typed("batched", Typed, str, batch=Batch(max=2)).lint() == []


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
