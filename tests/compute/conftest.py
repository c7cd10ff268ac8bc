"""An engine process loads PyTorch and SGLang, 10 s of a quiet core: its tests may take long on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name.startswith(("test_engine_", "test_takeover")):
            item.add_marker(pytest.mark.timeout(600))
