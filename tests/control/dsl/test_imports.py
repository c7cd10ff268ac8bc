"""What declaring a graph loads."""

from __future__ import annotations

import subprocess
import sys


def test_the_dsl_loads_no_tensor_library_and_no_extra():
    code = (
        "import sys, omni_flow.control.graph, omni_flow.control.codec, omni_flow.control.draw\n"
        "print([m for m in ('torch', 'pydantic', 'PIL', 'ml_dtypes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
