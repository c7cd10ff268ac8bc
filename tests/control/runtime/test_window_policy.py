"""A window policy looks at values; what runs on the window gets them by its own types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from omni_flow import Graph, launch, stream, window

Run = Callable[..., dict[str, Any]]


class Word(msgspec.Struct):
    text: str


class Halt:
    max_frames = 8

    def cut(self, frames: Sequence[Any], start: int, ended: bool) -> int | None:
        """Behind a word that ends a sentence; it sees words or plain text."""
        last = frames[-1]
        text = last["text"] if isinstance(last, dict) else getattr(last, "text", last)
        return len(frames) if text.endswith(".") else None


class Speech:
    def words(self, text: str) -> Iterator[str]:
        yield from text.split()

    def records(self, text: str) -> Iterator[Word]:
        yield from map(Word, text.split())

    def join(self, words: list[str]) -> str:
        return " ".join(words)

    def join_records(self, words: list[Word]) -> str:
        return " ".join(word.text for word in words)


def graph_of(method: str, join: str) -> Graph:
    graph = Graph("sentences")
    speech = graph.role("speech", Speech)
    words = speech.interface(method, inputs=[[graph.placeholder("text", str)]], outputs=[stream("word")])
    joined = graph.role("joiner", Speech).interface(
        join, inputs=[[{"words": window(words.word, policy=Halt())}]], outputs=["sentence"]
    )
    graph.output(sentence=joined.sentence)
    return graph


SENTENCES = {"sentence": ["One two.", "Three.", "Four"]}


def test_a_policy_cuts_text(run: Run) -> None:
    assert run(graph_of("words", "join"), text="One two. Three. Four") == SENTENCES


def test_a_policy_cuts_records(run: Run) -> None:
    assert run(graph_of("records", "join_records"), text="One two. Three. Four") == SENTENCES


def test_a_policy_cuts_what_came_from_another_process() -> None:
    for methods in (("words", "join"), ("records", "join_records")):
        with launch(graph_of(*methods)) as app:
            assert app.submit(text="One two. Three. Four").result(timeout=30) == SENTENCES
