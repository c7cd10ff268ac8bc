"""Health: alive, ready, and everything by role and replica. A dead role is never reported as healthy."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from omni_flow.deploy.places import DEGRADED, DOWN, STARTING, UP
from omni_flow.serve.http import Json
from omni_flow.serve.state import State

_ORDER = (UP, DEGRADED, STARTING, DOWN)


def report(state: State) -> dict[str, Any]:
    """The worst state of any role, and all roles of all graphs with their replicas."""
    worst, graphs = UP, {}
    for name, served in state.catalogue.graphs.items():
        roles = served.deployment.status()
        worst = max([worst, *(role.state for role in roles.values())], key=_ORDER.index)
        graphs[name] = {role: msgspec.to_builtins(status) for role, status in roles.items()}
    live = {name: len(s.deployment.gateway.live) for name, s in state.catalogue.graphs.items()}
    return {"status": "stopping" if state.stopping else worst, "graphs": graphs, "live": live}


def able(state: State) -> bool:
    """Whether every role has a replica that takes requests."""
    return not state.stopping and report(state)["status"] in (UP, DEGRADED)


def router(state: State) -> APIRouter:
    """The routes under `/health`."""
    routes = APIRouter(tags=["health"])

    @routes.head("/health/live", include_in_schema=False)
    @routes.get("/health/live")
    async def live() -> Response:
        """200 while the server's event loop turns."""
        return Json({"status": "live"})

    @routes.head("/health/ready", include_in_schema=False)
    @routes.get("/health/ready")
    async def ready() -> Response:
        """200 while requests can be served: every role has a live replica and the server is not stopping; else 503."""
        ok = able(state)
        return Json({"status": "ready" if ok else report(state)["status"]}, 200 if ok else 503)

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> Response:
        """Every role and replica: up, starting, degraded or down, and why. 503 if a role can't serve."""
        found = report(state)
        return Json(found, 200 if found["status"] in (UP, DEGRADED) else 503)

    return routes
