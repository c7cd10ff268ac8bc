from __future__ import annotations

from voice_vision_chat.graph import graph

from omni_flow.control.spec import Join
from omni_flow.control.types import Audio, Text


def test_the_graph_of_the_demo_has_no_finding_and_compiles() -> None:
    assert graph.lint() == []
    assert graph.compile().name == "voice_vision_chat"


def test_the_client_gets_text_pieces_and_sound_at_24_khz() -> None:
    spec = graph.lower()
    outputs = {o.field: o for i in spec.interfaces for o in i.outputs}
    text, speech, heard = (outputs[spec.outputs[name].field] for name in ("text", "speech", "heard"))
    assert (text.stream, text.type) == (True, Text())
    assert (speech.stream, speech.type) == (True, Audio(24_000))
    assert (heard.stream, heard.type) == (False, Text())


def test_a_spoken_question_goes_before_a_written_one_and_the_picture_is_optional() -> None:
    chat = next(i for i in graph.lower().interfaces if i.name == "llm.chat")
    assert [[(s.field, s.param, s.optional) for s in group] for group in chat.groups] == [
        [("asr.transcribe.text", "question", False), ("ocr.read.text", "seen", True)],
        [("text", "question", False), ("ocr.read.text", "seen", True)],
    ]


def test_each_sentence_is_spoken_as_a_window_by_one_of_two_replicas() -> None:
    spec = graph.lower()
    (slot,) = next(i for i in spec.interfaces if i.name == "tts.speak").groups[0]
    assert (slot.join, slot.param, slot.size) == (Join.WINDOW, "sentence", 64)
    assert {role.name: role.replicas for role in spec.roles} == {"asr": 1, "ocr": 1, "llm": 1, "tts": 2}
