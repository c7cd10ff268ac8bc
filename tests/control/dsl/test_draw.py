"""A graph as Mermaid, SVG and PNG."""

# ruff: noqa: C408
from __future__ import annotations

import io
import xml.etree.ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.draw import mermaid, png, svg
from omni_flow.control.draw.boxes import Box, Edge, Picture, join_text, picture
from omni_flow.control.draw.layout import lay_out
from omni_flow.control.draw.scene import Stroke, scene
from omni_flow.control.graph import Graph
from omni_flow.control.slots import Batch, collect, count, last, optional, ordered, stream, window

from .roles import One
from .test_example import declare


def loop() -> CompiledGraph:
    g = Graph("loop")
    x, back = g.placeholder("x", str, required=True), g.feedback("back")
    step = g.role("step", One, replicas=2).interface("take", [[x], [dict(x=back)]], ["x"], max_iters=3)
    back.bind(step.x)
    g.output(result=last(step.x))
    return g.compile()


def test_mermaid_of_the_example():
    assert mermaid(declare().compile()) == (
        "flowchart LR\n"
        '    n0(["speech<br/>Audio(16000)"])\n'
        '    n1(["picture<br/>Image"])\n'
        '    n2(["text<br/>Text"])\n'
        '    subgraph r0["asr<br/>Whisper"]\n'
        '        n3["transcribe"]\n'
        "    end\n"
        '    subgraph r1["ocr<br/>RapidOcr"]\n'
        '        n4["read"]\n'
        "    end\n"
        '    subgraph r2["llm<br/>SmolLM2"]\n'
        '        n5["chat"]\n'
        "    end\n"
        '    subgraph r3["tts<br/>Hibari, 2 replicas"]\n'
        '        n6["speak<br/>absent on error"]\n'
        "    end\n"
        '    n7(["text"])\n'
        '    n8(["speech"])\n'
        '    n9(["heard"])\n'
        "    n0 --> n3\n"
        "    n1 --> n4\n"
        '    n3 -->|"text: 1"| n5\n'
        '    n4 -->|"text: 1,2: optional"| n5\n'
        '    n2 -->|"2"| n5\n'
        '    n5 ==>|"token*: window Sentences"| n6\n'
        '    n5 ==>|"token*"| n7\n'
        '    n6 ==>|"audio*"| n8\n'
        '    n3 -->|"text"| n9\n'
    )


def test_a_back_edge_is_dashed_everywhere():
    graph = loop()
    assert '    n1 -.->|"x: 2"| n1\n' in mermaid(graph)
    assert svg(graph).count("stroke-dasharray") == 1
    assert [mark.dashed for mark in scene(picture(graph.spec)).marks if isinstance(mark, Stroke)] == [
        False,
        False,
        True,
    ]


def test_svg_is_well_formed_and_names_everything():
    text = svg(declare().compile())
    root = ET.fromstring(text)
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {
        "voice_vision_chat",
        "llm.chat",
        "SmolLM2",
        "question",
        "token*",
        "window Sentences",
        "absent on error",
    } <= words
    assert {"Hibari, 2 replicas", "speech", "Audio(16000)", "1,2: optional"} <= words


def test_png_is_a_picture_of_twice_the_size():
    graph = loop()
    made = scene(picture(graph.spec))
    image = Image.open(io.BytesIO(png(graph)))
    assert image.size == (int(made.width) * 2, int(made.height) * 2)
    assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_the_same_graph_gives_the_same_picture():
    assert svg(declare().compile()) == svg(declare().compile())


def test_joins_are_said_in_words():
    g = Graph("g")
    x = g.placeholder("x", str)
    y = g.role("a", One).interface("frames", [[x]], [stream("y")]).y
    slots = dict(
        a=y,
        b=optional(y),
        c=collect(y, over=y),
        d=count(y, 3),
        e=count(y, g.param("n", int)),
        f=count(y, g.placeholder("k", int)),
        g=last(y),
        h=window(y, 4),
        i=ordered(window(y, 4, 2, 1)),
        j=optional(collect(y)),
    )
    g.role("b", One).interface("many", [[slots]], ["o"], batch=Batch(2))
    texts = [join_text(slot) for slot in g.lower().interfaces[1].groups[0]]
    assert texts == [
        "",
        "optional",
        "collect over y",
        "count 3",
        "count param n",
        "count k",
        "last",
        "window 4",
        "ordered window 4 step 2 left 1",
        "optional collect",
    ]


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    count = draw(st.integers(1, 14))
    boxes, edges = [], []
    for i in range(count):
        sources = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        ports = tuple(f"p{s}" for s in sources)
        boxes.append(
            Box(f"b{i}", "interface", f"b{i}", ins=ports, outs=("o",), note=draw(st.sampled_from(["", "note"])))
        )
        edges += [Edge(f"b{s}", "o", f"b{i}", f"p{s}", draw(st.sampled_from(["", "collect"]))) for s in sources]
    return Picture("p", tuple(boxes), tuple(edges))


@given(pictures())
@settings(max_examples=60, deadline=None)
def test_boxes_never_overlap_and_edges_run_to_the_right(drawn):
    layout = lay_out(drawn, 10.0, 20.0)
    nodes = list(layout.nodes.values())
    for i, a in enumerate(nodes):
        assert a.x >= 9.99
        assert a.y >= 19.99
        for b in nodes[:i]:
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
            assert apart
    for way in layout.ways.values():
        assert [node.layer for node in way] == list(range(way[0].layer, way[-1].layer + 1))
