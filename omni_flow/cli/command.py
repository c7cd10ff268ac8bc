"""How every command ends: its errors as messages on stderr, the right exit code, a traceback only with `--debug`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from omni_flow.cli.errors import ExitCode, UserError
from omni_flow.control.declare import DeclarationError
from omni_flow.control.findings import GraphError

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="A folder with graph.py, a .py file, or module:attr.")
]


def stderr() -> Console:
    """Where messages go; results go to stdout."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def complain(what: str, mend: str = "") -> None:
    """Print one error with its mend."""
    text = Text.assemble(("error: ", "bold red"), what)
    if mend:
        text.append(f"\n  {mend}")
    stderr().print(text)


@contextlib.contextmanager
def guard(debug: bool) -> Iterator[None]:
    """Turns what a user can cause into a message and an exit code. With `debug` everything goes through."""
    try:
        yield
    except (UserError, GraphError, DeclarationError, KeyboardInterrupt) as error:
        if debug:
            raise
        raise typer.Exit(_tell(error)) from None


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command with a parameter `debug`, guarded by `guard`."""

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        with guard(kwargs["debug"]):
            command(*args, **kwargs)

    return inner


def _tell(error: BaseException) -> int:
    """Say what went wrong, and give the exit code."""
    if isinstance(error, KeyboardInterrupt):
        complain("cancelled")
        return ExitCode.CANCELLED
    if isinstance(error, UserError):
        complain(error.what, error.mend)
        return error.code
    if isinstance(error, GraphError):
        complain(f"graph {error.graph!r} cannot work")
        for finding in error.findings:
            stderr().print(Text(f"  {finding}".replace("\n", "\n  ")))
    else:
        complain(str(error))
    return ExitCode.WRONG_INPUT
