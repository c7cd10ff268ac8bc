"""What a bench ran on, in a line above its figures."""

from __future__ import annotations

import platform
from importlib.metadata import version


def described() -> str:
    """Processor, Python and SGLang."""
    processor = platform.processor() or platform.machine()
    return f"{processor}, Python {platform.python_version()}, sglang {version('sglang')}"
