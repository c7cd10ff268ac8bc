"""`omni-flow serve` as a process: plan, readiness, signals; `top`, `trace` and `key` beside it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_flow.serve.keys import digest_of

WAIT_S = 40

GRAPH = """
import asyncio
from omni_flow import Graph, Text, stream
from omni_flow.serve.endpoints import ChatCompletions


class Words:
    async def say(self, text: str):
        for word in text.split():
            if word == "wait":
                await asyncio.Event().wait()
            yield word + " "


graph = Graph("words")
text = graph.placeholder("text", Text, required=True)
said = graph.role("words", Words).interface("say", inputs=[[text]], outputs=[stream("word")])
graph.output(word=said.word)
endpoints = (ChatCompletions(text="text", out_text="word"),)
"""


def command(*args: object) -> list[str]:
    return [sys.executable, "-c", "from omni_flow.cli.main import run; run()", *map(str, args)]


def run(*args: object, **env: str) -> Any:
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=WAIT_S, env={**os.environ, "COLUMNS": "200", **env}
    )


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    (tmp_path / "graph.py").write_text(GRAPH)
    return tmp_path


class Served:
    def __init__(self, *args: object, **env: str) -> None:
        self.process = subprocess.Popen(
            command("serve", *args, "--port", 0), stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith("ready at "):
                self.url = line.split()[2]
                return
        raise AssertionError("\n".join(self.lines))

    def pids(self) -> list[int]:
        health = httpx.get(f"{self.url}/health").json()
        return [r["pid"] for g in health["graphs"].values() for role in g.values() for r in role["replicas"]]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        self.process.stderr.read()
        return self.process.wait(WAIT_S)


@pytest.fixture
def served(graph: Path) -> Iterator[Served]:
    made = Served(graph, "--drain", 1)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    assert made.process.stderr is not None
    made.process.stderr.close()


def wait_end(pid: int) -> None:
    """Wait until a process that isn't ours has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([watched], [], [], WAIT_S)
    os.close(watched)
    assert ended, f"process {pid} goes on"


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    own = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return own + [each for child in own for each in children(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_dry_run_shows_the_plan_and_starts_nothing(graph: Path) -> None:
    done = run("serve", graph, "--dry-run", "--replicas", "words=3", "--rate", 5)
    assert done.returncode == 0
    for part in (
        "graph words: words ×3",
        "POST /v1/chat/completions  model words",
        "a key 5/s",
        "API keys: none",
        "from nowhere",
        "10 s to end",
    ):
        assert part in done.stdout


def test_an_ssd_tier_below_nothing_is_refused_with_what_is_missing(graph: Path, tmp_path: Path) -> None:
    done = run("serve", graph, "--ssd", tmp_path / "ssd", "--ssd-bytes", "64M")
    assert done.returncode == 1
    assert "the SSD tier of graph 'words' can't be: an SSD tier needs a pool with an L2" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_served_is_said_in_words(graph: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("nonsense\n")
    taken = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "bad.py").write_text(GRAPH.replace('out_text="word"', 'out_text="nope"'))
    for args, part in (
        ((graph, "--api-keys-file", tmp_path / "keys"), "keys:1: no key"),
        ((tmp_path / "bad.py",), "no such output"),
        ((tmp_path / "nowhere",), "no such file"),
        ((graph, "--log-level", "loud"), "--log-level loud"),
        ((graph, "--replicas", "wrods=2"), "did you mean words?"),
        ((graph, "--port", taken.getsockname()[1]), "choose another --port"),
    ):
        done = run("serve", *args)
        assert done.returncode == 2
        assert part in done.stderr.replace("\n", " ")
        assert "Traceback" not in done.stderr
    taken.close()


def test_it_says_what_is_ready_and_ends_cleanly_on_a_signal(served: Served) -> None:
    assert any("limits: 4096 live requests" in line for line in served.lines)
    body = {"messages": [{"role": "user", "content": "a b"}]}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "a b "
    pids = served.pids()
    assert served.stop() == 0
    assert not any(alive(pid) for pid in pids)


def test_requests_under_way_are_cancelled_when_their_time_is_over(served: Served) -> None:
    body = {"inputs": {"text": "begun wait"}, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/graphs/words/requests", json=body, timeout=WAIT_S) as answer:
        lines = answer.iter_lines()
        assert any("begun" in line for line in lines)
        pids = served.pids()
        served.process.send_signal(signal.SIGTERM)
        assert '"outcome":"cancelled"' in "".join(lines)
    assert served.stop() == 0
    assert not any(alive(pid) for pid in pids)


def test_a_server_that_is_killed_leaves_no_process_and_no_file(graph: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    made = Served(graph, TMPDIR=str(own))
    pids = [*made.pids(), *children(made.process.pid)]
    assert [path for path in own.rglob("*") if path.is_socket()]
    body = {"inputs": {"text": "begun wait"}, "stream": True}
    with httpx.stream("POST", f"{made.url}/v1/graphs/words/requests", json=body, timeout=WAIT_S) as answer:
        assert any("begun" in line for line in answer.iter_lines())
        made.process.kill()
        made.process.wait(WAIT_S)
    assert made.process.stderr is not None
    made.process.stderr.close()
    for pid in pids:
        wait_end(pid)
    assert not [path for path in own.rglob("*") if not path.is_dir()]


def test_top_and_trace_show_a_server(served: Served) -> None:
    httpx.post(f"{served.url}/v1/graphs/words/requests", json={"inputs": {"text": "a b"}, "timeline": True})
    shown = run("top", "--url", served.url, "--once").stdout
    for part in ("words/0", "words.say", "up"):
        assert part in shown
    snapshot = json.loads(run("top", "--url", served.url, "--json").stdout)
    assert snapshot["graphs"][0]["name"] == "words"
    traced = run("trace", "--url", served.url)
    assert "words.say" in traced.stdout
    assert "words/0@0" in traced.stdout
    missing = run("trace", "nope", "--url", served.url)
    assert (missing.returncode, "no request 'nope'" in missing.stderr) == (1, True)
    assert run("top", "--url", "http://127.0.0.1:1").returncode == 2


def test_a_key_is_made_and_its_digest_kept() -> None:
    secret, line = run("key", "alice").stdout.split("\n")[:2]
    assert line == f"alice {digest_of(secret)}"
    assert run("key", "a b").returncode == 2
