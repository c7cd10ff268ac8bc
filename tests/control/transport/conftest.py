"""Runs the coroutine tests of this directory on asyncio's loop and on uvloop, and checks what each leaves behind."""

import asyncio
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from transport_kit import Net

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_loop: starts processes, so it runs on uvloop only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "loop_name" in metafunc.fixturenames:
        one = metafunc.definition.get_closest_marker("one_loop")
        metafunc.parametrize("loop_name", ["uvloop"] if one else list(LOOPS))


@pytest.fixture(scope="session", autouse=True)
def uvloop_has_opened_what_it_keeps() -> None:
    """The first uvloop of a process opens descriptors that stay; they are no leak of the first test."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


def descriptors() -> set[tuple[str, str]]:
    """The descriptors that are open here, and what each is of."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@pytest.fixture
def net(kind: str, tmp_path: Path) -> Net:
    return Net(kind, tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    net: Net | None = pyfuncitem.funcargs.get("net")
    before = descriptors()
    raised: list[dict[str, Any]] = []

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        try:
            await pyfuncitem.obj(**arguments)
        finally:
            if net is not None:
                await net.close()

    with asyncio.Runner(loop_factory=LOOPS[pyfuncitem.funcargs["loop_name"]]) as runner:
        runner.run(guarded())
    assert raised == [], "a callback raised inside the loop"
    assert descriptors() - before == set(), "file descriptors were left open"
    if net is not None:
        assert net.files() == [], "socket files were left"
    return True
