from __future__ import annotations

from pathlib import Path

import pytest

from omni_flow.cli import target
from omni_flow.cli.errors import UserError

from .conftest import GRAPH

HELP = "a target is a folder with graph.py, a .py file, or module:attr"


def refused(text: str) -> tuple[str, str]:
    with pytest.raises(UserError) as info:
        target.load(text)
    assert info.value.code == 2
    return info.value.what, info.value.mend


def test_a_folder_with_graph_py_is_a_target(words: Path) -> None:
    found = target.load("words")
    assert found.graph.name == "words"
    assert found.place == f"{words}/graph.py:graph"


def test_a_file_is_a_target_by_any_path(words: Path) -> None:
    assert target.load("words/graph.py").graph is target.load(str(words / "graph.py")).graph


def test_a_module_with_an_attribute_is_a_target(words: Path) -> None:
    (words / "__init__.py").touch()
    assert target.load("words.graph:graph").graph is target.load("words").graph


def test_a_folder_that_is_a_package_is_imported_as_one(words: Path) -> None:
    (words / "__init__.py").touch()
    (words / "graph.py").write_text("from .roles import graph as inner\n")
    (words / "roles.py").write_text(GRAPH)
    found = target.load("words")
    assert found.graph.name == "words"
    assert found.place.endswith("words/graph.py:inner")


def test_two_files_of_one_name_do_not_meet(words: Path, folder: Path) -> None:
    (folder / "graph.py").write_text(GRAPH.replace('Graph("words")', 'Graph("other")'))
    assert target.load("words").graph.name == "words"
    assert target.load("graph.py").graph.name == "other"


def test_of_several_graphs_the_one_called_graph_is_taken_else_one_must_be_named(words: Path) -> None:
    two = 'from omni_flow.control.graph import Graph\na = Graph("a")\nb = Graph("b")\n'
    (words / "two.py").write_text(two)
    assert refused("words/two.py") == (
        "words/two.py has several graphs",
        "name one of words/two.py:a, words/two.py:b",
    )
    assert target.load("words/two.py:b").graph.name == "b"
    (words / "three.py").write_text(two + "graph = a\n")
    assert target.load("words/three.py").graph.name == "a"


@pytest.mark.parametrize(
    ("text", "what", "mend"),
    [
        ("word", "word: no such file, folder or module", "did you mean words?"),
        ("./word", "./word: no such file or folder", "did you mean words?"),
        ("words/grap.py", "words/grap.py: no such file or folder", "did you mean graph.py?"),
        ("no/such/thing", "no/such/thing: no such file or folder", HELP),
        ("what is this", "what is this: no such file, folder or module", HELP),
        ("omni_flow.nothing", "omni_flow.nothing: no such file, folder or module", HELP),
        ("words:grahp", "words:grahp: the module has no graph 'grahp'", "did you mean graph?"),
        ("words:Words", "words:Words: Words is a type, not a Graph", "there is graph"),
        (".", ". has no graph.py", "there is words"),
        ("words/notes.txt", "words/notes.txt is no Python file", HELP),
        ("words/none.py", "words/none.py: the module has no Graph", 'declare one: graph = Graph("name")'),
    ],
)
def test_what_is_no_target_is_named_with_a_hint(words: Path, text: str, what: str, mend: str) -> None:
    (words / "notes.txt").touch()
    (words / "none.py").touch()
    assert refused(text) == (what, mend)


def test_an_error_in_the_users_code_names_their_line(words: Path) -> None:
    (words / "graph.py").write_text("\nx = 1 / 0\n")
    assert refused("words") == (f"{words}/graph.py:2: ZeroDivisionError: division by zero", "")


def test_a_syntax_error_names_its_line(words: Path) -> None:
    (words / "graph.py").write_text("def (:\n")
    assert refused("words") == (f"{words}/graph.py:1: syntax error: invalid syntax", "")


def test_a_missing_import_of_the_users_code_says_what_to_install(words: Path) -> None:
    (words / "graph.py").write_text("import not_installed_anywhere\n")
    assert refused("words") == (
        f"{words}/graph.py:1: ModuleNotFoundError: No module named 'not_installed_anywhere'",
        "install what provides 'not_installed_anywhere'; `omni-flow doctor` says what is missing for what",
    )
