"""What the README and the pages show is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from omni_flow.cli.main import app

from .conftest import Cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md", "docs/cli.md")]


def test_the_graph_of_the_readme_has_25_lines_at_most_and_no_finding(cli: Cli, folder: Path) -> None:
    assert len(BLOCKS[0].splitlines()) <= 25
    (folder / "hello.py").write_text(BLOCKS[0])
    assert cli("lint", "hello.py").stdout == "graph 'hello' is fine: 0 errors, 0 notes\n"


def test_the_commands_of_the_readme_work(cli: Cli, folder: Path) -> None:
    (folder / "hello.py").write_text(BLOCKS[0])
    assert cli("explain", "hello.py").exit_code == 0
    assert "500 schedules" in cli("simulate", "hello.py", "--schedules", 500).stdout
    result = cli("run", "hello.py", "--text", "why?", "--mood", "quite calm", "--one-process")
    assert result.exit_code == 0
    assert {"CALM.", "calm."} <= set(result.stdout.split())


def test_the_client_of_the_readme_prints_what_it_says(folder: Path) -> None:
    """In processes, as it stands there, by a plain script."""
    (folder / "ask.py").write_text(BLOCKS[0] + "\n" + BLOCKS[1])
    result = subprocess.run([sys.executable, "ask.py"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    said = [line.split(" ", 1) for line in result.stdout.splitlines()]
    assert [value for name, value in said if name == "speech"] == ["YOU ASK: WHY? ", "I STAY QUITE ", "CALM. "]
    assert "".join(value for name, value in said if name == "text") == "You ask: why? I stay quite calm. "


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "concepts.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_every_command_is_on_its_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in get_command(app).commands:
        assert f"`{name}" in page


def test_the_map_names_every_package() -> None:
    page = (ROOT / "docs" / "README.md").read_text()
    for package in (ROOT / "omni_flow").iterdir():
        if (package / "__init__.py").is_file():
            assert f"`omni_flow/{package.name}/`" in page, package.name
