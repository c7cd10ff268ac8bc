"""The example of the design document, word for word, with stand-in roles of the right signatures."""

# ruff: noqa: C408, E501
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_flow.control.graph import Graph
from omni_flow.control.slots import optional, stream, window
from omni_flow.control.types import Audio, Image, ListOf, Text


class Whisper:
    def __init__(self, model: str) -> None:
        self.model = model

    def transcribe(self, speech: np.ndarray) -> str:
        return f"{len(speech)} samples"


class RapidOcr:
    def read(self, picture: np.ndarray) -> str:
        return f"{picture.shape}"


class SmolLM2:
    async def chat(self, ctx: Any, question: str, seen: str | None = None) -> Any:
        for word in f"{question} {seen}".split():
            yield word


class Hibari:
    def speak(self, sentence: list[str]) -> Iterator[np.ndarray]:
        for _ in sentence:
            yield np.zeros(3, np.float32)


@dataclass(frozen=True)
class Sentences:
    max_frames: int

    def cut(self, frames: Sequence[str], start: int, ended: bool) -> int | None:
        return next((i + 1 for i in range(start, len(frames)) if frames[i].endswith(".")), None)


def declare() -> Graph:
    # fmt: off
    g = Graph("voice_vision_chat")
    speech, picture, text = g.placeholder("speech", Audio(16_000)), g.placeholder("picture", Image), g.placeholder("text", Text)
    heard = g.role("asr", Whisper, init={"model": "tiny"}).interface("transcribe", inputs=[[speech]], outputs=["text"])
    seen = g.role("ocr", RapidOcr).interface("read", inputs=[[picture]], outputs=["text"])
    llm = g.role("llm", SmolLM2).interface("chat", outputs=[stream("token")],
        inputs=[[dict(question=heard.text, seen=optional(seen.text))], [dict(question=text, seen=optional(seen.text))]])
    tts = g.role("tts", Hibari, replicas=2).interface("speak", on_error="absent", outputs=[stream("audio")],
        inputs=[[dict(sentence=window(llm.token, policy=Sentences(max_frames=64)))]])
    g.output(text=llm.token, speech=tts.audio, heard=heard.text)
    # fmt: on
    return g


def test_the_example_compiles_without_a_finding():
    assert [str(f) for f in declare().lint()] == []
    graph = declare().compile()
    assert graph.outputs == ("text", "speech", "heard")
    assert list(graph.interfaces) == ["asr.transcribe", "ocr.read", "llm.chat", "tts.speak"]
    assert list(graph.placeholders) == ["speech", "picture", "text"]
    assert graph.roles["tts"].replicas == 2
    assert graph.roles["asr"].init == {"model": "tiny"}


def test_types_come_from_the_annotations():
    graph = declare().compile()
    types = {o.field: o.type for i in graph.spec.interfaces for o in i.outputs}
    assert types["asr.transcribe.text"] == Text()
    assert str(types["tts.speak.audio"]) == "Tensor"
    assert graph.placeholders["speech"].type == Audio(16_000)
    assert ListOf(Text()) != Text()


def test_groups_keep_their_declared_order_and_bind_by_name():
    first, second = declare().compile().interfaces["llm.chat"].groups
    assert [(s.param, s.field, s.optional) for s in first] == [
        ("question", "asr.transcribe.text", False),
        ("seen", "ocr.read.text", True),
    ]
    assert [(s.param, s.field, s.optional) for s in second] == [
        ("question", "text", False),
        ("seen", "ocr.read.text", True),
    ]


def test_a_compiled_graph_cannot_be_changed():
    graph = declare().compile()
    with pytest.raises(FrozenInstanceError):
        graph.name = "other"  # type: ignore[misc]


def test_every_declaration_knows_its_line():
    graph = declare().compile()
    slot = graph.interfaces["tts.speak"].groups[0][0]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for place, word in ((graph.interfaces["llm.chat"].where, 'g.role("llm"'), (slot.where, "window(llm.token")):
        file, _, line = place.rpartition(":")
        assert file == __file__
        assert word in lines[int(line) - 1]
