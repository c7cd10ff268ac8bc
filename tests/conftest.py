"""What holds for all tests."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell starts a background job with SIGINT ignored, and all that the job starts inherits it: tests that interrupt a
# process would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Engines that name no device run on the CPU, as the tests expect, also where there is a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

WITHOUT_SGLANG = sys.version_info >= (3, 13)
"""SGLang 0.5.17 is for Python 3.11 and 3.12. Where it could be installed its absence is a failure, not an excuse."""
NEEDS_SGLANG = (
    "cli/test_commands.py::test_doctor_checks_the_versions",
    "compute/test_docs.py::test_the_example",
    "compute/test_engine_",
    "compute/test_takeover.py",
    "compute/test_docs.py::test_the_example",
    "examples/test_deepseek",
    "examples/test_deepseek_tiers.py",
    "examples/test_demo_kills.py",
    "examples/test_demo_roles.py::test_all_roles_close",
    "examples/test_demo_talk.py",
    "models/test_engine_role.py::test_a_role_outlives_its_engine",
    "models/test_engine_role.py::test_an_answer_that_may_be_retried",
    "serve/test_deepseek.py",
    "serve/test_demo.py",
    "serve/test_engine_faults.py",
    "serve/test_session_kv.py",
)
"""How the names of tests begin that run an engine or read its package; beside them, those with the fixture `llm`."""
_left_out: set[str] = set()


@pytest.fixture(autouse=True)
def log_goes_where_it_went() -> Iterator[None]:
    """A command that a test calls sets up logging for its process; its stderr is closed when that test has ended."""
    loggers = [logging.getLogger(name) for name in ("", "omni_flow.data", "uvicorn.error", "asyncio", "websockets")]
    before = [(one.handlers[:], one.filters[:], one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, filters, level, propagate) in zip(loggers, before, strict=True):
        one.handlers[:], one.filters[:], one.propagate = handlers, filters, propagate
        one.setLevel(level)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs an engine where there can be none."""
    if not WITHOUT_SGLANG:
        return
    here = Path(__file__).parent
    for item in list(items):
        file = item.path.relative_to(here).as_posix()
        if f"{file}::{item.name}".startswith(NEEDS_SGLANG) or "llm" in getattr(item, "fixturenames", ()):
            items.remove(item)
            _left_out.add(file)
            config.hook.pytest_deselected(items=[item])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not covered."""
    if _left_out:
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        terminalreporter.write_line(
            f"NOT COVERED on Python {python}: what runs an engine, for SGLang 0.5.17 is for Python 3.11 and 3.12: "
            + ", ".join(sorted(_left_out))
        )
