"""A pool, or a manager, that can't be is refused in words, from Python, from JSON and from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from omni_flow.data.cli import memory_app
from omni_flow.data.errors import BadArgument, DataError
from omni_flow.data.launch import load_config
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

SOUND = {"name": "kv", "page_bytes": 64, "l1_pages": 8}
BAD_POOLS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "a/b"}, "slashes"),
    ({"name": "a\nb"}, "name"),
    ({"name": "n" * 101}, "name"),
    ({"page_bytes": 0}, "page_bytes"),
    ({"page_bytes": -64}, "page_bytes"),
    ({"l1_pages": 0}, "l1_pages"),
    ({"l1_pages": 1 << 33}, "l1_pages"),
    ({"l2_pages": -1}, "l2_pages"),
    ({"l3_pages": -1}, "l3_pages"),
    ({"l2_pages": 1 << 31, "l3_pages": 1 << 31}, "all tiers"),
    ({"padding": 8}, "padding"),
    ({"padding": -1}, "padding"),
    ({"l1_device": -2}, "l1_device"),
    ({"planes": 0}, "planes"),
    ({"planes": 5}, "planes"),
    ({"high": 1.5}, "high"),
    ({"high": 0.5, "low": 0.6}, "low"),
    ({"staging": -2}, "staging"),
    ({"death_quarantine_s": -1.0}, "death_quarantine_s"),
]
BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"pools": [SOUND, SOUND]}, "two pools of one name"),
    ({"pools": [SOUND | {"name": f"{i:0100}"} for i in range(23)]}, "23 pools"),
    ({"path": ""}, "path"),
    ({"path": "p" * 200}, "path"),
    ({"node": "n" * 33}, "node"),
    ({"temp_bytes": -1}, "temp_bytes"),
    ({"orphan_s": -0.5}, "orphan_s"),
]


@pytest.mark.parametrize(("change", "named"), BAD_POOLS)
def test_a_pool_that_cannot_be_is_refused_by_the_name_of_what_is_wrong(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(BadArgument, match=named):
        PoolSpec(**SOUND | change)
    with pytest.raises(BadArgument, match=named):
        msgspec.structs.replace(PoolSpec(**SOUND), **change)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"path": "m.sock", "pools": [SOUND | change]}))
    with pytest.raises(DataError, match=f"config.json: .*{named}"):
        load_config(str(file))


@pytest.mark.parametrize("change", [{"page_bytes": "64"}, {"l1_pages": 8.0}, {"name": 7}, {"high": math.nan}])
def test_a_pool_of_values_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=next(iter(change))):
        PoolSpec(**SOUND | change)


@pytest.mark.parametrize(("change", "named"), BAD_CONFIGS)
def test_a_manager_that_cannot_be_is_refused_by_the_name_of_what_is_wrong(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"path": "m.sock"} | change))
    with pytest.raises(DataError, match=f"config.json: .*{named}"):
        load_config(str(file))
    change = change | {"pools": tuple(PoolSpec(**pool) for pool in change.get("pools", ()))}
    with pytest.raises(BadArgument, match=named):
        ServerConfig(**{"path": "m.sock"} | change)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pool", "name=,page=4K,l1=8"], "name"),
        (["--pool", "name=a/b,page=4K,l1=8"], "slashes"),
        (["--pool", "name=kv,page=0,l1=8"], "page_bytes"),
        (["--pool", "name=kv,page=4K,l1=0"], "l1_pages"),
        (["--pool", "name=kv,page=4K,l1=8,l2=-1"], "l2_pages"),
        (["--pool", "name=kv,page=4K,l1=8,padding=8"], "padding"),
        (["--pool", "name=kv,page=4K,l1=8"] * 2, "two pools"),
        (["--temp", "-1M"], "temp_bytes"),
    ],
)
def test_the_command_line_refuses_them_without_a_traceback(options: list[str], said: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(memory_app, ["serve", "--path", "/nowhere/m.sock", *options])
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert isinstance(result.exception, SystemExit)
