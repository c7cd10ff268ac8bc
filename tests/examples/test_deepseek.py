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
import engine_kit
import pytest

from omni_flow import Graph, launch
from omni_flow.deploy.errors import LaunchError
from omni_flow.models.tokenizer import Processor
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


def answers(graph: Graph, **replicas: int) -> tuple[list[dict[str, Any]], set[str]]:
    """What a deployment says to the questions, all at once, and which replicas had a part in it."""
    with launch(graph, replicas=replicas) as app:
        requests = [app.submit(prompt=question, params=PARAMS, timeline=True) for question in QUESTIONS]
        said = [request.result(timeout=120) for request in requests]
        return said, {span.replica for request in requests for span in request.timeline()}


def reused(question: str) -> int:
    """Tokens of the prompt but for its last, which fill no page of 16."""
    return len(f"?User: {question}\n\nAssistant:".encode()) // 16 * 16


@pytest.mark.timeout(600)
def test_two_roles_say_what_transformers_says(tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    processor = Processor(folder)
    prompt = list(processor.chat([{"role": "user", "content": QUESTIONS[2]}]).ids)
    tokens, _ = engine_kit.oracle_greedy(engine_kit.oracle(folder), prompt, 12)
    assert processor.end_id not in tokens
    pieces = processor.stream()
    with launch(disaggregated.build(str(folder))) as app:
        said = app.submit(prompt=QUESTIONS[2], params={"max_tokens": 12}).result(timeout=300)
    assert "".join(said["text"]) == pieces.add_all(tokens)
    assert said["reused"] == reused(QUESTIONS[2])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_roles_of_two_replicas_say_what_one_role_says_and_the_second_finds_the_kv_of_the_first(
    tmp_path: Path,
) -> None:
    folder = str(tiny_checkpoint("deepseek_v2", tmp_path))
    whole, _ = answers(llm_only.build(folder))
    split, replicas = answers(disaggregated.build(folder), prefill=2, decode=2)
    assert len(replicas) == 4
    assert ["".join(one["text"]) for one in split] == ["".join(one["text"]) for one in whole]
    assert any(len("".join(one["text"])) > 10 for one in whole)
    assert [one["reused"] for one in split] == [reused(question) for question in QUESTIONS]


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
