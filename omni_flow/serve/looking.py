"""The page at `/`, its live feed, and `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.resources import files

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from omni_flow.serve.errors import ApiError
from omni_flow.serve.http import EventStream, Json, call_of
from omni_flow.serve.state import State
from omni_flow.serve.watch import Watch, encode_event

KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob: data:; "
    "connect-src 'self'; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def router(state: State, watch: Watch) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["looking"])
    folder = files("omni_flow.serve") / "page"
    assets = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in KINDS}

    def asset(name: str) -> Response:
        data = assets.get(name)
        if data is None:
            raise ApiError(404, f"there is no {name}", code="not_found")
        return Response(data, media_type=KINDS[name.rpartition(".")[2]], headers=HEADERS)

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return asset("index.html")

    @routes.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return asset(name)

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Everything that is counted, for Prometheus."""
        await watch.census()
        watch.tick()
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/live")
    async def live(request: Request, once: bool = False) -> Response:
        """What the server does: one snapshot a second as events, or with `once` a single one as JSON."""
        tenant = call_of(request).tenant
        if once:
            return Json(await watch.snapshot(tenant))
        return EventStream(_feed(state, watch, tenant), lambda: None)

    return routes


async def _feed(state: State, watch: Watch, tenant: str) -> AsyncIterator[bytes]:
    while not state.stopping:
        yield encode_event(await watch.snapshot(tenant))
        await asyncio.sleep(1.0)
