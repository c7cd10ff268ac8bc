"""DeepSeek-V2 in one role and in two, as a user runs them, with a tiny checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepseek_v2_disaggregated.graph as disaggregated
import deepseek_v2_llm_only.graph as llm_only
import pytest

from omni_flow import Graph, launch
from omni_flow.deploy.errors import LaunchError
from omni_flow.testing import tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = [
    f"{word} is the sky blue, and why is it red when the sun goes down?" for word in ("Why", "Warum", "🙂 Why")
]
PARAMS = {"max_tokens": 24}


@pytest.mark.parametrize("graph", [llm_only.graph, disaggregated.graph])
def test_the_graphs_have_no_finding(graph: Graph) -> None:
    assert graph.lint() == []


@pytest.mark.parametrize("build", [llm_only.build, disaggregated.build])
def test_a_missing_checkpoint_is_named_before_anything_starts(build: Any, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"none/config\.json.*official layout"):
        launch(build(str(tmp_path / "none")))


@pytest.mark.parametrize("name", ["deepseek_v2_llm_only", "deepseek_v2_disaggregated"])
def test_engines_are_set_from_the_environment_and_a_wrong_field_is_named(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    code = f"""
from omni_flow.deploy.pools import kv_pools
from {name}.graph import graph
plan = graph.compile().plan
(pool,) = kv_pools(plan, {{role.spec.name: 1 for role in plan.roles}})
print(pool.l1_pages / len(plan.roles))
"""

    def loaded(engine: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join((str(EXAMPLES), *(path for path in sys.path if path)))
        environment = dict(os.environ, PYTHONPATH=paths, DEEPSEEK_V2=str(folder), DEEPSEEK_V2_ENGINE=engine)
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)

    assert loaded('{"max_tokens": 12800, "page_size": 32}').stdout == f"{12800 / 32 + 2 * 64}\n"
    assert "DEEPSEEK_V2_ENGINE: Object contains unknown field `max_tokenz`" in loaded('{"max_tokenz": 1}').stderr


def answers(graph: Graph, **replicas: int) -> list[dict[str, Any]]:
    """What a deployment says to the questions, all at once."""
    with launch(graph, replicas=replicas) as app:
        requests = [app.submit(prompt=question, params=PARAMS) for question in QUESTIONS]
        return [request.result(timeout=60) for request in requests]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_roles_say_what_one_role_says_and_the_second_finds_the_kv_of_the_first(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint("deepseek_v2", tmp_path))
    whole = answers(llm_only.build(folder))
    split = answers(disaggregated.build(folder), prefill=1, decode=2)
    assert ["".join(one["text"]) for one in split] == ["".join(one["text"]) for one in whole]
    assert any(len("".join(one["text"])) > 10 for one in whole)
    # the prompt, but for its last tokens, which fill no page of 16
    prompts = [len(f"?User: {question}\n\nAssistant:".encode()) for question in QUESTIONS]
    assert [one["reused"] for one in split] == [tokens // 16 * 16 for tokens in prompts]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_command_line_of_the_real_checkpoint_serves_a_tiny_one(tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    command = [sys.executable, "-c", "from omni_flow.cli.main import run; run()", "run"]
    command += [
        str(EXAMPLES / "deepseek_v2_disaggregated"),
        "--prompt",
        QUESTIONS[0],
        "--param",
        "max_tokens=3",
        "--json",
    ]
    environment = dict(os.environ, DEEPSEEK_V2=str(folder))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["outcome"] == "done"
    assert said["outputs"]["reused"] == 80
