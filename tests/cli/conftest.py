"""A small graph in files of its own, and the command run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from omni_flow.cli.main import app

GRAPH = """
from omni_flow.control.graph import Graph
from omni_flow.control.slots import collect, stream
from omni_flow.control.types import Text


class Words:
    def split(self, text: str):
        yield from text.split()

    def join(self, word: list[str]) -> str:
        return " ".join(reversed(word))


graph = Graph("words")
text = graph.placeholder("text", Text, required=True)
words = graph.role("words", Words)
split = words.interface("split", inputs=[[text]], outputs=[stream("word")])
join = words.interface("join", inputs=[[collect(split.word)]], outputs=["text"])
graph.output(word=split.word, text=join.text)
"""

Cli = Callable[..., Result]


@pytest.fixture
def cli() -> Cli:
    """`cli("lint", "x")` runs the command and returns its exit code, stdout and stderr."""
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})

    def call(*args: object, stdin: str | bytes | None = None) -> Result:
        result = runner.invoke(app, [str(a) for a in args], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder; modules imported from it and entries of the path are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def words(folder: Path) -> Path:
    """The folder `words` with `graph.py`."""
    (folder / "words").mkdir()
    (folder / "words" / "graph.py").write_text(GRAPH)
    return folder / "words"
