"""Omni-Flow: serve any-to-any multimodal models made of unlike parts.

Declare a graph (`Graph`, the joins, the types), then `graph.compile()`, lint, simulate or `launch` it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.context import Context
from omni_flow.control.findings import Finding, GraphError
from omni_flow.control.graph import Graph
from omni_flow.control.request import Outcome
from omni_flow.control.runtime.errors import InvalidInput, NoReplica, Overloaded, RequestFailed
from omni_flow.control.runtime.gateway import Limits, Span
from omni_flow.control.runtime.methods import emit
from omni_flow.control.slots import Batch, collect, count, last, optional, ordered, stream, window
from omni_flow.control.types import KV, Audio, Bytes, Image, Json, Tensor, Text, Tokens
from omni_flow.refs import ABSENT, KVRef, TensorRef

if TYPE_CHECKING:
    from omni_flow.deploy.local import alaunch, launch

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "KV",
    "Audio",
    "Batch",
    "Bytes",
    "CompiledGraph",
    "Context",
    "Finding",
    "Graph",
    "GraphError",
    "Image",
    "InvalidInput",
    "Json",
    "KVRef",
    "Limits",
    "NoReplica",
    "Outcome",
    "Overloaded",
    "RequestFailed",
    "Span",
    "Tensor",
    "TensorRef",
    "Text",
    "Tokens",
    "alaunch",
    "collect",
    "count",
    "emit",
    "last",
    "launch",
    "optional",
    "ordered",
    "stream",
    "window",
]


def __getattr__(name: str) -> Any:
    """`launch` and `alaunch` bring the deployment layer with them only when they are used."""
    if name in ("launch", "alaunch"):
        from omni_flow.deploy import local

        return getattr(local, name)
    raise AttributeError(f"module 'omni_flow' has no attribute {name!r}")
