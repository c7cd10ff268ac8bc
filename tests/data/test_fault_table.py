"""docs/data_plane_faults.md names only what exists, and all tests that were written for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "data_plane_faults.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)


def names_in(file: str) -> set[str]:
    """Tests of a module: its functions and classes, and the test cases of state machines."""
    names = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith(("test_", "Test"))}


def test_every_fault_has_tests_and_each_exists() -> None:
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", TABLE, re.MULTILINE)]
    assert numbers == list(range(1, 34))
    rows = [line for line in TABLE.splitlines() if re.match(r"\| [^-|]", line) and "| test |" not in line]
    assert [row for row in rows if "::" not in row] == []
    known = {file: names_in(file) for file in {file for file, _ in TESTS}}
    assert [f"{file}::{name}" for file, name in TESTS if name not in known[file]] == []


def test_every_module_named_exists() -> None:
    modules = re.findall(r"`(omni_flow/[\w/]+\.py)`", TABLE)
    assert len(modules) >= 33
    assert [module for module in modules if not (ROOT / module).is_file()] == []


def test_every_test_of_a_fault_is_named() -> None:
    written = {
        f"{path.relative_to(ROOT)}::{name}"
        for path in (ROOT / "tests" / "data").rglob("test_fault_*.py")
        if path != Path(__file__)
        for name in names_in(str(path.relative_to(ROOT)))
    }
    assert written - {f"{file}::{name}" for file, name in TESTS} == set()
