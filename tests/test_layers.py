"""Who may import whom. The layers evolve apart only as long as this holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "omni_flow"


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module that is imported anywhere in a file, also inside functions; not what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = f"{base}{node.module or ''}".rstrip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        yield from imports(node, package)


def imports_of(layer: str) -> Iterator[tuple[str, str]]:
    """(file, module) for everything that a package or module of ours imports from outside itself."""
    where = PACKAGE / layer
    for file in sorted(where.rglob("*.py")) if where.is_dir() else [where]:
        package = ".".join(("omni_flow", *file.parent.relative_to(PACKAGE).parts))
        for name in imports(ast.parse(file.read_text()), package):
            parts = name.split(".")
            if parts[0] == "omni_flow" and parts[1:2] != [layer]:
                yield str(file.relative_to(PACKAGE)), name


@pytest.mark.parametrize("layer", ["control", "data"])
def test_control_and_data_know_neither_each_other_nor_what_lies_above_only_refs(layer: str) -> None:
    assert [(file, name) for file, name in imports_of(layer) if name.split(".")[1:2] != ["refs"]] == []


def test_every_package_depends_on_what_the_map_says() -> None:
    text = (PACKAGE.parent / "docs" / "README.md").read_text()
    rows = re.findall(r"^\| `omni_flow/([\w.]+)/?` \|[^|]*\|([^|]*)\|", text, re.MULTILINE)
    names = {row for row, _ in rows}
    assert names >= {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    said = {row: names & set(re.findall(r"`([\w.]+)", cell)) for row, cell in rows if cell.strip() != "all"}
    said.pop("__init__.py")  # it imports a name's home when somebody asks for the name
    found = {row: {name.split(".")[1] for _, name in imports_of(row) if "." in name} - {"refs"} for row in said}
    assert found == said


def test_of_compute_the_engine_process_alone_knows_that_there_are_models() -> None:
    knows = {(file, name) for file, name in imports_of("compute") if name.split(".")[1:2] == ["models"]}
    assert knows == {("compute/sglang/worker.py", f"omni_flow.models.families{what}") for what in ("", ".family_of")}


@pytest.mark.parametrize("layer", ["control", "data"])
def test_importing_control_or_data_brings_no_torch(layer: str) -> None:
    names = [
        ".".join(("omni_flow", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for file in sorted((PACKAGE / layer).rglob("*.py"))
        if file.name != "__main__.py"
    ]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr == ""
    assert result.stdout == "False\n"


def test_data_is_imported_without_the_control_flow_and_control_without_data() -> None:
    code = """
import sys
import omni_flow.LAYER
print(sorted(name for name in sys.modules if name.startswith("omni_flow.OTHER")))
"""
    for layer, other in (("data", "control"), ("control", "data"), ("data.launch", "control"), ("refs", "control")):
        filled = code.replace("LAYER", layer).replace("OTHER", other)
        result = subprocess.run([sys.executable, "-c", filled], capture_output=True, text=True, timeout=60, check=False)
        assert (result.stdout, result.stderr) == ("[]\n", ""), layer


def test_the_public_names_are_there_though_nothing_is_imported_before_their_use() -> None:
    code = """
import omni_flow, sys
assert not [name for name in sys.modules if name.startswith("omni_flow.")]
assert set(omni_flow.__all__) <= set(dir(omni_flow))
assert set(omni_flow.__all__) == set(omni_flow._HOME)
for name in omni_flow.__all__:
    assert getattr(omni_flow, name) is getattr(omni_flow, name)
try:
    omni_flow.Grpah
except AttributeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == ("module 'omni_flow' has no attribute 'Grpah'\n", "")


def test_the_command_starts_without_any_extra() -> None:
    code = """
import sys
for name in ("torch", "fastapi", "starlette", "uvicorn", "PIL", "soundfile", "soxr", "transformers", "sglang", "ray",
             "redis", "pydantic", "opentelemetry"):
    sys.modules[name] = None
sys.argv = ["omni-flow", "--version"]
from omni_flow.cli.main import run
run()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
