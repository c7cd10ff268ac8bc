"""The shape of a graph for those who look at it: what is read by whom. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_flow.control.compiled import CompiledGraph

CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Edge:
    """A field from where it is made to one reader. `source` and `reader`: an interface, or the client."""

    source: str
    field: str
    reader: str
    stream: bool

    def as_object(self) -> dict[str, Any]:
        """As JSON."""
        return {"source": self.source, "field": self.field, "reader": self.reader, "stream": self.stream}


def edges_of(graph: CompiledGraph) -> list[Edge]:
    """All edges, each once, in declared order; those of placeholders begin and those of outputs end at the client."""
    spec = graph.spec
    made = {o.field: (i.name, o.stream) for i in spec.interfaces for o in i.outputs}
    made |= {p.name: (CLIENT, p.stream) for p in spec.placeholders}
    made |= {name: made[field] for name, field in spec.feedback.items() if field in made}
    found: dict[tuple[str, str, str], Edge] = {}

    def note(field: str, reader: str) -> None:
        if field in made:
            source, stream = made[field]
            found.setdefault((source, field, reader), Edge(source, field, reader, stream))

    for interface in spec.interfaces:
        for group in interface.groups:
            for slot in group:
                note(slot.field, interface.name)
    for slot in spec.outputs.values():
        note(slot.field, CLIENT)
    return list(found.values())
