"""An engine that starts has everything of SGLang taken over, or says by name what it has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import engine_kit as kit

PROBE = Path(__file__).parent / "takeover_probe.py"
STEP_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs"
TABLES = {
    "cpu": "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry",
    "gpu": "sglang.srt.configs.model_config.mla_breakable_cuda_graph_supported_model_archs",
}


def test_each_hook_and_each_part_that_is_not_in_force_is_named_and_a_start_leaves_no_file(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    done = subprocess.run(
        [sys.executable, str(PROBE), str(kit.GOLDENS / "deepseek_v2_lite"), str(tmp_path / "m.sock")],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "TMPDIR": str(files)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in files.iterdir() if path.is_file()] == []
    found = json.loads(done.stdout.splitlines()[-1])
    for device, hooks, removable in (("cpu", 19, 16), ("gpu", 14, 13)):
        undone, (gone, message) = found["hooks"][device]["undone"], found["hooks"][device]["renamed"]
        assert undone.pop("") == ""
        assert len(undone) >= hooks
        assert STEP_HOOK in undone
        assert undone == {target: f"SGLang did not take these hooks: {target}" for target in undone}
        assert len(gone) >= removable
        assert message == f"SGLang did not take these hooks: {', '.join(sorted(gone))}"
        entries = found["hooks"][device]["unentered"]
        assert list(entries) == [TABLES[device]]
        assert entries == {table: f"SGLang did not take these hooks: {table}" for table in entries}
    assert found["parts"].pop("") == ""
    assert found["parts"].pop("step hook") == "SGLang has not made the step hook step_hooks:Codes"
    assert found["parts"].pop("KV buffers") == "SGLang's KV buffers are not in the arena"
    assert len(found["parts"]) == 4
    for name, message in found["parts"].items():
        assert message.startswith(f"SGLang's {name} is ")
