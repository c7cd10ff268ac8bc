"""`--ssd` and `--ssd-bytes` of the commands that launch a graph."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from omni_flow.cli.errors import UserError
from omni_flow.data.cli import parse_size

Ssd = Annotated[
    str | None, typer.Option("--ssd", metavar="DIR", help="Directory of the SSD tier (L3) of KV pools with an L2.")
]
SsdBytes = Annotated[
    int | None,
    typer.Option("--ssd-bytes", metavar="SIZE", parser=parse_size, help="Most bytes there of a graph, e.g. 200G."),
]


def memory_options(ssd: str | None, ssd_bytes: int | None, one_process: bool) -> dict[str, Any]:
    """What the flags say to `launch`; nothing where they are not given. Raises UserError."""
    if ssd is None and ssd_bytes is None:
        return {}
    if not ssd or ssd_bytes is None or ssd_bytes < 1:
        raise UserError("an SSD tier needs a directory and a size", "give --ssd DIR and --ssd-bytes 200G")
    if one_process:
        raise UserError("--ssd and --one-process: in one process there is no memory manager", "leave one of them out")
    from omni_flow.deploy.memory import Memory

    return {"memory": Memory(ssd=ssd, ssd_bytes=ssd_bytes)}
