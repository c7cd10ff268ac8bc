from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli

CASE = {
    "inputs": {"text": "one two"},
    "tables": {
        "words.split": [{"when": {"text": "one two"}, "give": [["word", "one"], ["word", "two"]]}],
        "words.join": [{"when": {"word": ["one", "two"]}, "give": [["text", "two one"]]}],
    },
}


def write(case: object) -> str:
    Path("case.json").write_text(json.dumps(case))
    return "case.json"


def test_what_was_run_is_reported(cli: Cli, words: Path) -> None:
    result = cli("simulate", "words", "--schedules", 40, "--seed", 3)
    assert result.exit_code == 0
    assert "graph 'words', seed 3: 40 schedules" in result.stdout
    assert "0 divergences" in result.stdout


def test_an_interface_that_never_ran_ends_with_1(cli: Cli, words: Path) -> None:
    result = cli("simulate", "words", "--schedules", 40, "--only", 1000)
    assert result.exit_code == 1
    assert "never active: words.join, words.split" in result.stdout


def test_roles_can_be_tables_over_inputs_of_ones_own(cli: Cli, words: Path) -> None:
    result = cli("simulate", "words", "--case", write(CASE), "--schedules", 40)
    assert result.exit_code == 0
    assert "0 absent and 0 failed facts" in result.stdout


def test_roles_can_be_the_graphs_own_or_any_class_or_function(cli: Cli, words: Path) -> None:
    (words / "other.py").write_text("def shout(word):\n    return ' '.join(word).upper()\n")
    own = cli("simulate", "words", "--role", "words", "--schedules", 40)
    other = cli("simulate", "words", "--role", "words.join=words/other.py:shout", "--schedules", 40)
    assert own.exit_code == other.exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--role", "wrods"], "error: --role: the graph has no role 'wrods'\n  did you mean words?\n"),
        (["--role", "words.jion=x:y"], "error: --role: the graph has no role or interface 'words.jion'\n"),
        (["--role", "words=words/graph.py"], "error: words/graph.py names no class or function\n"),
        (["--role", "words=words/graph.py:Wrods"], "did you mean Words?\n"),
        (["--case", "gone.json"], "error: gone.json: No such file or directory\n  check the path\n"),
    ],
)
def test_what_is_not_there_is_named(cli: Cli, words: Path, args: list[str], message: str) -> None:
    result = cli("simulate", "words", *args)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"input": {}}, "case.json: Object contains unknown field `input`\n  see the form in docs/cli.md\n"),
        ({"inputs": {"txet": ""}}, "case.json: the graph has no placeholder 'txet'\n  did you mean text?\n"),
        ({"tables": {"words.split": [{"give": []}]}}, "missing required field `when`"),
        ({"inputs": {"text": "one"}, "tables": CASE["tables"]}, "words.split: no row for inputs {'text': 'one'}"),
    ],
)
def test_a_wrong_case_is_refused(cli: Cli, words: Path, case: object, message: str) -> None:
    result = cli("simulate", "words", "--case", write(case))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_policy_of_the_user_that_raises_is_named_by_its_line(cli: Cli, words: Path) -> None:
    code = (words / "graph.py").read_text().replace("collect(split.word)", "window(split.word, policy=Broken())")
    code = code.replace("import collect,", "import window,") + "\n"
    policy = (
        "\n\nclass Broken:\n    max_frames = 4\n\n    def cut(self, frames, start, ended):\n        return frames.cut\n"
    )
    (words / "graph.py").write_text(code.replace("\n\ngraph =", policy + "\n\ngraph ="))
    result = cli("simulate", "words")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {words}/graph.py:")
    assert "AttributeError: 'list' object has no attribute 'cut'" in result.stderr
