"""A graph that is being served: its deployment, what goes in and out of it, and the endpoints it states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.types import Type
from omni_flow.deploy.local import AsyncDeployment
from omni_flow.serve.endpoints import Endpoint
from omni_flow.serve.errors import ApiError

E = TypeVar("E", bound=Endpoint)


class Served:
    """One graph with its running deployment. `kinds`: the type of each output; `streams`: those that come in pieces."""

    def __init__(self, graph: CompiledGraph, deployment: AsyncDeployment, endpoints: Sequence[Endpoint] = ()) -> None:
        """Raises MappingError if an endpoint doesn't fit the graph."""
        for endpoint in endpoints:
            endpoint.check(graph)
        self.name = graph.name
        self.graph = graph
        self.deployment = deployment
        self.endpoints = tuple(endpoints)
        declared: dict[str, Any] = {o.field: o.type for i in graph.spec.interfaces for o in i.outputs}
        declared.update((p.name, p.type) for p in graph.spec.placeholders)
        visible = [o for o in graph.plan.outputs if not o.hidden]
        self.kinds = {o.name: _type(declared.get(graph.spec.outputs[o.name].field)) for o in visible}
        self.streams = {o.name for o in visible if o.depth}
        self.inputs = {p.name: _type(p.type) for p in graph.spec.placeholders}
        self.pushed = {p.name for p in graph.spec.placeholders if p.stream}

    def model_of(self, endpoint: Endpoint) -> str:
        """The name callers use for an endpoint."""
        return endpoint.model or self.name

    def models(self) -> list[str]:
        """All names callers may use for this graph."""
        return list(dict.fromkeys([self.model_of(e) for e in self.endpoints])) or [self.name]

    def describe(self) -> dict[str, Any]:
        """For `/v1/graphs`."""
        spec = self.graph.spec
        return {
            "id": self.name,
            "object": "graph",
            "placeholders": [
                {"name": p.name, "type": str(self.inputs[p.name] or "any"), "stream": p.stream, "required": p.required}
                for p in spec.placeholders
            ],
            "params": [
                {"name": p.name, "type": str(_type(p.type) or "any"), "default": p.default} for p in spec.params
            ],
            "outputs": [
                {"name": name, "type": str(kind or "any"), "stream": name in self.streams}
                for name, kind in self.kinds.items()
            ],
            "roles": [{"name": r.name, "stateful": r.stateful} for r in spec.roles],
            "endpoints": [{"endpoint": type(e).__name__, "model": self.model_of(e)} for e in self.endpoints],
        }


def _type(declared: Any) -> Type | None:
    return declared if isinstance(declared, Type) else None


class Catalogue:
    """All graphs of a server, by name and by model."""

    def __init__(self, served: Sequence[Served]) -> None:
        """Raises ValueError if two graphs or two endpoints of a kind have one name."""
        self.graphs = {s.name: s for s in served}
        if len(self.graphs) != len(served):
            raise ValueError("two graphs of a server have the same name")
        self._found: dict[tuple[type, str], tuple[Served, Endpoint]] = {}
        for each in served:
            for endpoint in each.endpoints:
                key = (type(endpoint), each.model_of(endpoint))
                if key in self._found:
                    raise ValueError(f"two {key[0].__name__} endpoints have the model name {key[1]!r}")
                self._found[key] = (each, endpoint)
        self.models = {name: each for each in served for name in each.models()}

    def graph(self, name: str) -> Served:
        """Raises ApiError 404."""
        found = self.graphs.get(name)
        if found is None:
            raise ApiError(
                404, f"there is no graph {name!r}; there is {', '.join(self.graphs)}", code="graph_not_found"
            )
        return found

    def endpoint(self, kind: type[E], model: object) -> tuple[Served, E]:
        """The graph and endpoint for a model name; without one the only one. Raises ApiError naming `model`."""
        if model is not None and not isinstance(model, str):
            raise ApiError(400, f"expected a name, got {type(model).__name__}", param="model", code="invalid_type")
        names = [name for k, name in self._found if k is kind]
        if model is None and len(names) == 1:
            model = names[0]
        found = self._found.get((kind, model or ""))
        if found is None or not isinstance(found[1], kind):
            known = f"; those that do: {', '.join(names)}" if names else "; no graph here does"
            if model is None:
                raise ApiError(400, f"name a model{known}", param="model", code="missing_required_parameter")
            why = "does not serve this endpoint" if model in self.models else "does not exist"
            raise ApiError(404, f"the model {model!r} {why}{known}", param="model", code="model_not_found")
        return found[0], found[1]
