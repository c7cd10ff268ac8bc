"""Omni-Flow: serve any-to-any multimodal models made of unlike parts.

Declare a graph (`Graph`, the joins, the types), then `graph.compile()`, lint, simulate or `launch` it. A name's layer
is imported when the name is first used, so that `omni_flow.data` alone brings nothing of the control flow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_flow.control.compiled import CompiledGraph
    from omni_flow.control.context import Context
    from omni_flow.control.findings import Finding, GraphError
    from omni_flow.control.graph import Graph
    from omni_flow.control.request import Outcome
    from omni_flow.control.runtime.errors import InvalidInput, NoReplica, Overloaded, RequestFailed
    from omni_flow.control.runtime.gateway import Limits
    from omni_flow.control.runtime.live_request import Span
    from omni_flow.control.runtime.methods import emit
    from omni_flow.control.slots import Batch, collect, count, last, optional, ordered, stream, window
    from omni_flow.control.strategies import cache_aware, weighted
    from omni_flow.control.types import KV, Audio, Bytes, Image, Json, Tensor, Text, Tokens
    from omni_flow.deploy.local import alaunch, launch
    from omni_flow.refs import ABSENT, KVRef, TensorRef

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
    "cache_aware",
    "collect",
    "count",
    "emit",
    "last",
    "launch",
    "optional",
    "ordered",
    "stream",
    "weighted",
    "window",
]

_HOMES = {
    "control.compiled": ("CompiledGraph",),
    "control.context": ("Context",),
    "control.findings": ("Finding", "GraphError"),
    "control.graph": ("Graph",),
    "control.request": ("Outcome",),
    "control.runtime.errors": ("InvalidInput", "NoReplica", "Overloaded", "RequestFailed"),
    "control.runtime.gateway": ("Limits",),
    "control.runtime.live_request": ("Span",),
    "control.runtime.methods": ("emit",),
    "control.slots": ("Batch", "collect", "count", "last", "optional", "ordered", "stream", "window"),
    "control.strategies": ("cache_aware", "weighted"),
    "control.types": ("KV", "Audio", "Bytes", "Image", "Json", "Tensor", "Text", "Tokens"),
    "deploy.local": ("alaunch", "launch"),
    "refs": ("ABSENT", "KVRef", "TensorRef"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, brought from its module on first use."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'omni_flow' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"omni_flow.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
