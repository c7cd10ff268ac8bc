"""Makes the package under `examples/` importable by its own name, as `omni-flow run examples/NAME` does, and the kit of
the engine tests."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
sys.path[:0] = [str(EXAMPLES), str(TESTS / "compute")]
