"""Makes the package under `examples/` importable by its own name, as `omni-flow run examples/NAME` does."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
