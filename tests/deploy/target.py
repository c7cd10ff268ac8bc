"""What a fresh interpreter imports in a test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from deploy.roles import Echo, diamond, one

graph = diamond()
another = one(Echo)
