"""The routes under `/v1/sessions`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from omni_flow.serve.errors import bad
from omni_flow.serve.http import Json, call_of, json_body
from omni_flow.serve.memory import session_kv
from omni_flow.serve.openai import read
from omni_flow.serve.schema import body_schema
from omni_flow.serve.state import State


class Change(msgspec.Struct, forbid_unknown_fields=True):
    """Params for the requests of a session from now on."""

    params: dict[str, Any]


def router(state: State) -> APIRouter:
    """List, show, change and close the caller's sessions."""
    routes = APIRouter(tags=["sessions"])

    @routes.get("/v1/sessions")
    async def list_sessions(request: Request) -> Response:
        """The caller's sessions."""
        mine = state.sessions.list(call_of(request).tenant)
        return Json({"object": "list", "data": [session.as_object() for session in mine]})

    @routes.get("/v1/sessions/{id}")
    async def show_session(id: str, request: Request) -> Response:
        """One session: its turns, its live requests, its params, and the KV it has in each tier."""
        session = state.sessions.find(call_of(request).tenant, id)
        kv = await session_kv(state.memory.values(), session.key, session.salt)
        return Json({**session.as_object(), "kv": kv})

    @routes.patch("/v1/sessions/{id}", openapi_extra=body_schema(Change))
    async def change_session(id: str, request: Request) -> Response:
        """Params for its requests from now on: {"params": {...}}. Makes the session if there is none."""
        params = read(await json_body(request), Change).params
        known = {name for served in state.catalogue.graphs.values() for name in served.graph.params}
        for name in params:
            if name not in known:
                raise bad(f"no graph here has a param {name!r}", f"params.{name}", "unknown_parameter")
        session = state.sessions.of(call_of(request).tenant, id)
        session.params = {**session.params, **params}
        return Json(session.as_object())

    @routes.delete("/v1/sessions/{id}")
    async def close_session(id: str, request: Request) -> Response:
        """Cancel its live requests and forget it."""
        call = call_of(request)
        session = state.sessions.close(call.tenant, id)
        for running in [r for r in state.book.live.values() if r.session is session]:
            running.cancel()
        return Json({"id": id, "object": "session", "closed": True})

    return routes
