"""An engine that starts has everything of SGLang taken over, or says by name what it has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import engine_kit as kit

PROBE = Path(__file__).parent / "takeover_probe.py"


def test_each_hook_and_each_part_that_is_not_in_force_is_named_and_a_start_leaves_no_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROBE), str(kit.GOLDENS / "deepseek_v2_lite")],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    found = json.loads(done.stdout.splitlines()[-1])
    undone = found["hooks"]["undone"]
    assert undone.pop("") == ""
    assert len(undone) >= 18
    assert undone == {target: f"SGLang did not take these hooks: {target}" for target in undone}
    gone, message = found["hooks"]["renamed"]
    assert len(gone) >= 15
    assert message == f"SGLang did not take these hooks: {', '.join(sorted(gone))}"
    assert found["parts"].pop("") == ""
    assert len(found["parts"]) == 4
    for name, message in found["parts"].items():
        assert message.startswith(f"SGLang's {name} is ")
