"""The application: all routes over the deployments of some graphs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import omni_flow
from omni_flow.serve import audio, chat, completions, health, images, native, native_socket, realtime, sessions_api
from omni_flow.serve.errors import ApiError, of_validation
from omni_flow.serve.guard import Guard
from omni_flow.serve.http import Json
from omni_flow.serve.keys import Key, Keys
from omni_flow.serve.served import Served
from omni_flow.serve.settings import Settings
from omni_flow.serve.state import State


def make_app(served: Sequence[Served], settings: Settings | None = None, keys: Iterable[Key] = ()) -> FastAPI:
    """An ASGI application; `app.state.omni` is its State.

    The deployments run on the loop that runs the application; starting and closing them is the caller's.
    Raises ValueError, MappingError: names that clash, endpoints that don't fit.
    """
    state = State(served, settings or Settings())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await state.close()

    app = FastAPI(
        title="Omni-Flow",
        version=omni_flow.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.omni = state
    for part in PARTS:
        app.include_router(part(state))
    app.add_middleware(Guard, settings=state.settings, keys=Keys(keys), metrics=state.metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(msgspec.ValidationError, _invalid)
    return app


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
