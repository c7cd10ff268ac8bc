"""`--ssd` and `--ssd-bytes`: an SSD tier for the graph that a command launches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Cli

DEEP = """
from omni_flow import Graph
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.pool_spec import PoolSpec


class Deep:
    @classmethod
    def kv_pools(cls):
        return (PoolSpec(name="kv", page_bytes=4096, l1_pages=8, l2_pages=8),)

    async def setup(self, data):
        with MemoryManagerClient(data.address, name="role") as client:
            while not client.stats()["pool_l3_on/kv"]:
                client.wait_end(0.02)
            (self.pool,) = client.welcome.pools

    async def look(self, x: int) -> bool:
        return self.pool.l3


graph = Graph("deep")
x = graph.placeholder("x", int)
graph.output(l3=graph.role("r", Deep).interface("look", [[x]], ["l3"]).l3)
"""


def test_a_graph_runs_with_its_kv_on_a_disk(folder: Path) -> None:
    (folder / "deep.py").write_text(DEEP)
    command = [
        sys.executable,
        "-c",
        "from omni_flow.cli.main import run; run()",
        "run",
        "deep.py",
        "--x",
        "1",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--ssd", "ssd", "--ssd-bytes", "64M"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"] == {"l3": True}
    assert (folder / "ssd" / "deep.0" / "kv" / "lock").is_file()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ssd", "ssd"], "--ssd-bytes 200G"),
        (["--ssd-bytes", "1G"], "--ssd DIR"),
        (["--ssd", "ssd", "--ssd-bytes", "0"], "--ssd-bytes 200G"),
        (["--ssd", "ssd", "--ssd-bytes", "many"], "'many' is no size"),
        (["--ssd", "ssd", "--ssd-bytes", "1G", "--one-process"], "no memory manager"),
    ],
)
@pytest.mark.parametrize("command", [["run", "--x", "1"], ["serve", "--dry-run"]])
def test_half_of_an_ssd_tier_is_refused(
    folder: Path, cli: Cli, command: list[str], flags: list[str], said: str
) -> None:
    (folder / "deep.py").write_text(DEEP)
    name, *more = command
    result = cli(name, "deep.py", *more, *flags)
    assert result.exit_code == 2
    assert said in result.stderr
