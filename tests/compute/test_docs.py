"""docs/compute.md: its example runs, its maps have every file, what it names is there."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from omni_flow.testing import tiny_checkpoint

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compute.md").read_text()


def mapped(heading: str) -> set[str]:
    """Paths in the first column of the map under a heading; a bare name lies where the one before it does."""
    found: set[str] = set()
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for row in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w/.]+)`", row):
            folder = name.rpartition("/")[0] or folder
            found.add(name if "/" in name else f"{folder}/{name}".lstrip("/"))
    return found


def modules(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "__init__.py"}


def test_the_map_has_every_module_and_no_other() -> None:
    assert mapped("Map") | {"errors.py"} == modules(ROOT / "omni_flow" / "compute")
    assert "`omni_flow/compute/errors.py`" in PAGE


def test_the_map_of_the_models_has_every_module_and_no_other() -> None:
    there = {name if "/" not in name else f"{name.split('/')[0]}/" for name in modules(ROOT / "omni_flow" / "models")}
    assert {name if name.endswith(".py") else f"{name.strip('/')}/" for name in mapped("Models")} == there


def test_every_script_file_and_page_that_is_named_is_there() -> None:
    for name in re.findall(r"`((?:bench|examples|omni_flow|requirements)/[\w./-]+)", PAGE):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(benchmarks/[\w.]+)`", PAGE) + re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert name.startswith("https://") or (ROOT / "docs" / name).exists(), name


def test_scripts_have_the_flags_they_are_shown_with() -> None:
    shown = [line.split() for line in re.findall(r"`(bench/[^`]+\.py [^`]+)`", PAGE)]
    assert shown
    for script, *words in shown:
        for flag in words:
            assert not flag.startswith("--") or f'"{flag}"' in (ROOT / script).read_text(), (script, flag)


@pytest.mark.timeout(600)
def test_the_example_prints_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example, whole_graph = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    compile(whole_graph, "compute.md", "exec")  # tests/examples/test_deepseek_tiers.py runs one
    assert "path/to/checkpoint" in example
    model = str(tiny_checkpoint("deepseek_v2", tmp_path / "model"))
    code = compile(example.replace("path/to/checkpoint", model), "compute.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"ids": [5, 6, 7]}
    asyncio.run(eval(code, names))
    printed = [int(line) for line in capsys.readouterr().out.split()]
    assert 1 <= len(printed) <= 64
