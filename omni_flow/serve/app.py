"""The application: all routes over the deployments of some graphs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import omni_flow
from omni_flow.serve import (
    audio,
    chat,
    completions,
    health,
    images,
    looking,
    native,
    native_socket,
    realtime,
    sessions_api,
)
from omni_flow.serve.errors import ApiError, of_validation
from omni_flow.serve.guard import Guard
from omni_flow.serve.http import Json
from omni_flow.serve.keys import Key, Keys
from omni_flow.serve.served import Served
from omni_flow.serve.settings import Settings
from omni_flow.serve.state import State
from omni_flow.serve.watch import Watch


class Application(Guard):
    """An ASGI application: the guard around FastAPI's routes (`api`). `state` is what the routes share."""

    def __init__(self, api: FastAPI, state: State, keys: Iterable[Key]) -> None:
        super().__init__(api, state.settings, Keys(keys), state.metrics)
        self.api, self.state = api, state


def make_app(served: Sequence[Served], settings: Settings | None = None, keys: Iterable[Key] = ()) -> Application:
    """All routes over running deployments, which live on the loop that runs the application.

    Starting and closing the deployments is the caller's. Raises ValueError, MappingError: names that clash, endpoints
    that don't fit.
    """
    state = State(served, settings or Settings())
    watch = Watch(state)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ticking = asyncio.ensure_future(watch.run())
        yield
        ticking.cancel()
        await state.close()

    api = FastAPI(
        title="Omni-Flow",
        version=omni_flow.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app = Application(api, state, keys)
    for routes in (*(part(state) for part in PARTS), looking.router(state, watch)):
        api.include_router(routes)
        for route in routes.routes:
            if isinstance(route, APIRoute) and "POST" in (route.methods or ()):
                _shorten(app, route, state)
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(msgspec.ValidationError, _invalid)
    api.add_exception_handler(Exception, _failed)
    return app


def _shorten(app: Application, route: APIRoute, state: State) -> None:
    """Let the guard call a POST route by itself."""
    if not route.param_convertors:
        app.direct(route.path, route, route.endpoint)
    elif set(route.param_convertors) == {"graph"}:
        for name in state.catalogue.graphs:
            app.direct(route.path.format(graph=name), route, functools.partial(route.endpoint, name))


PARTS = (
    health.router,
    native.router,
    sessions_api.router,
    chat.router,
    completions.router,
    audio.router,
    images.router,
    native_socket.router,
    realtime.router,
)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Json(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        found = ApiError(404, f"there is no {request.method} {path}", code="not_found")
    elif error.status_code == 405:
        found = ApiError(405, f"{path} takes no {request.method}", code="method_not_allowed")
    else:
        found = ApiError(error.status_code, str(error.detail), code="invalid_request")
    return Json(found.body(), found.status, dict(error.headers or {}))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, msgspec.ValidationError)
    found = of_validation(error)
    return Json(found.body(), found.status)


async def _failed(request: Request, error: Exception) -> Response:
    """The guard logs it."""
    found = ApiError(500, "the server failed; its log has the cause", code="internal_error")
    return Json(found.body(), found.status)
