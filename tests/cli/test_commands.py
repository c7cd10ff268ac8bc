from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omni_flow.cli import doctor, packages, system
from omni_flow.cli.packages import Extra, Package

from .conftest import Cli


def test_lint_of_a_fine_graph_ends_with_0(cli: Cli, words: Path) -> None:
    result = cli("lint", "words")
    assert (result.exit_code, result.stdout) == (0, "graph 'words' is fine: 0 errors, 0 notes\n")


def test_lint_shows_each_finding_with_place_and_mend_and_ends_with_2(cli: Cli, words: Path) -> None:
    code = (words / "graph.py").read_text()
    (words / "graph.py").write_text(code.replace('"split", inputs', '"spilt", inputs'))
    result = cli("lint", "words")
    assert result.exit_code == 2
    assert f"{words}/graph.py:18: error [" in result.stdout
    assert "    mend: " in result.stdout
    assert result.stdout.endswith("graph 'words' cannot work: 1 error, 0 notes\n")


def test_lint_as_json_is_one_object(cli: Cli, words: Path) -> None:
    code = (words / "graph.py").read_text()
    (words / "graph.py").write_text(code.replace('"split", inputs', '"spilt", inputs'))
    result = cli("lint", "words", "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["graph"] == "words"
    assert [f["level"] for f in found["findings"]] == ["error"]


def test_a_wrong_declaration_is_told_without_a_traceback(cli: Cli, words: Path) -> None:
    code = (words / "graph.py").read_text()
    (words / "graph.py").write_text(code.replace('"words", Words', '"words", Words, replicas=0'))
    result = cli("lint", "words")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {words}/graph.py:17: DeclarationError: replicas: expected an int of at least 1, got 0\n"
    )


def test_debug_shows_the_traceback(words: Path) -> None:
    (words / "graph.py").write_text("x = 1 / 0\n")
    command = [sys.executable, "-c", "from omni_flow.cli.main import run; run()", "lint", "words", "--debug"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<svg"), (".png", b"\x89PNG"), (".mmd", b"flowchart")])
def test_draw_writes_the_kind_that_the_name_says(cli: Cli, words: Path, suffix: str, start: bytes) -> None:
    result = cli("draw", "words", "-o", f"x{suffix}")
    assert (result.exit_code, result.stdout) == (0, f"x{suffix}: 2 interfaces of 1 roles\n")
    assert start in Path(f"x{suffix}").read_bytes()[:200]


def test_draw_prints_mermaid_if_no_file_is_named(cli: Cli, words: Path) -> None:
    assert cli("draw", "words").stdout.startswith("flowchart")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.pgn", "error: x.pgn: no kind of picture is called .pgn\n  did you mean .png?\n"),
        ("x.gif", "error: x.gif: no kind of picture is called .gif\n  name it .svg, .png or .mmd\n"),
        ("x", "error: x: no kind of picture is called that\n  name it .svg, .png or .mmd\n"),
        ("no/x.svg", "error: no/x.svg: No such file or directory\n"),
    ],
)
def test_draw_refuses_what_it_cannot_write(cli: Cli, words: Path, name: str, message: str) -> None:
    result = cli("draw", "words", "-o", name)
    assert (result.exit_code, result.stderr) == (2, message)


def test_draw_of_a_graph_that_cannot_work_shows_the_findings(cli: Cli, words: Path) -> None:
    code = (words / "graph.py").read_text()
    (words / "graph.py").write_text(code.replace('"split", inputs', '"spilt", inputs'))
    result = cli("draw", "words")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: graph 'words' cannot work\n")
    assert "mend: " in result.stderr


def test_explain_shows_placement_edges_joins_and_credit(cli: Cli, words: Path) -> None:
    result = cli("explain", "words")
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "words Words() 1 1 process least_loaded" in rows
    assert "words.join request request word ← collect of words.split.word" in rows
    assert "text words.split request unix the only one" in rows
    assert "words.split.word words.join words.split.word same replica the only one" in rows
    assert "words.split.word client: word words.split.word unix –" in rows
    assert "words.split.word stream request 64 client: word –" in rows


def test_explain_follows_replicas_and_transport(cli: Cli, words: Path) -> None:
    code = (words / "graph.py").read_text()
    (words / "graph.py").write_text(
        code.replace("join = words.", 'join = graph.role("joiner", Words).').replace(
            "collect(split.word)", "split.word"
        )
    )
    result = cli("explain", "words", "--replicas", "joiner=2", "--transport", "tcp", "--json")
    found = json.loads(result.stdout)
    assert [(r["role"], r["replicas"], r["placement"]) for r in found["roles"]] == [
        ("words", 1, "1 process"),
        ("joiner", 2, "2 processes"),
    ]
    edge = next(e for e in found["edges"] if e["to"] == "joiner.join")
    assert (edge["transport"], edge["route"]) == ("tcp", "one per words.split.word")
    assert found["streams"][0]["waits_for"] == ["joiner.join", "client: word", "client: text"]


def test_a_wrong_flag_or_command_is_answered_with_the_nearest_one(cli: Cli, words: Path) -> None:
    wrong_flag, wrong_command = cli("lint", "words", "--jsn"), cli("lnt", "words")
    assert wrong_flag.exit_code == wrong_command.exit_code == 2
    assert "--json" in wrong_flag.stderr
    assert "lint" in wrong_command.stderr


def test_doctor_names_this_machine_and_every_extra(cli: Cli) -> None:
    result = cli("doctor")
    assert result.exit_code == 0
    for name in ("Python", "cores", "memory", "/dev/shm", "open files", "core", "[torch]", "[sglang]", "[demo]"):
        assert name in result.stdout
    found = json.loads(cli("doctor", "--json").stdout)
    core = found["extras"][0]
    assert core["complete"]
    assert "msgspec" in [p["name"] for p in core["packages"]]
    assert {e["name"] for e in found["extras"]} == set(doctor.PURPOSE)


def test_doctor_says_that_another_processor_sends_arrays_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "ORDERED", False)
    found = next(fact for fact in system.facts() if fact.name == "processor")
    assert (found.level, "arrays travel in messages" in found.mend) == ("low", True)


def test_doctor_says_how_to_get_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    ray = Extra("ray", (Package("ray", "ray>=2.40", None, False),), "pip install 'omni-flow[ray]'")
    old = Extra("", (Package("numpy", "numpy>=1.26", "1.20", False),), "pip install omni-flow")
    doctor._print([system.Fact("memory", "1.0 GiB available", "low", "end other programs")], [old, ray])
    out = capsys.readouterr().out
    assert "! memory                 1.0 GiB available\n      end other programs\n" in out
    assert "✗ core " in out
    assert "      lack: numpy>=1.26 (1.20)\n      get:  pip install omni-flow\n" in out
    assert "      lack: ray>=2.40 (not installed)\n      get:  pip install 'omni-flow[ray]'\n" in out


def test_doctor_checks_the_versions_that_the_engine_is_made_for() -> None:
    on_cpu = {p.name: p for p in packages.engine_packages(gpu=False)}
    assert {name: p.wanted for name, p in on_cpu.items()} == {
        "torch": "torch>=2.11.0",
        "transformers": "transformers==5.12.1",
        "xgrammar": "xgrammar==0.2.1",
    }
    assert all(p.fits for p in on_cpu.values())
    on_gpu = {p.name: p for p in packages.engine_packages(gpu=True)}
    assert set(on_gpu) - set(on_cpu) == {"sglang-kernel", "flashinfer_python"}
    sglang = next(e for e in packages.extras() if e.name == "sglang")
    assert {"sglang", *on_cpu} <= {p.name for p in sglang.packages}


def test_the_version_is_printed(cli: Cli) -> None:
    assert cli("--version").stdout.startswith("omni-flow 0.")
