"""`/v1/images/generations` and `/v1/images/edits`, and `/v1/files/` where pictures lie that were asked for by URL."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from omni_flow.control.types import ListOf
from omni_flow.refs import ABSENT
from omni_flow.serve.endpoints import Images
from omni_flow.serve.errors import ApiError, bad, unsupported
from omni_flow.serve.forms import as_body, read_form
from omni_flow.serve.http import EventStream, Json, call_of, encode, faults, json_body, while_connected
from omni_flow.serve.openai import now, take
from omni_flow.serve.running import Running
from omni_flow.serve.schema import body_schema, form_schema
from omni_flow.serve.served import Served
from omni_flow.serve.state import State
from omni_flow.serve.values import apng, b64, load

_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}
KEEP_S, KEEP_BYTES = 3600.0, 128 * 2**20


class ImageRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A picture to draw."""

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=32_000)]
    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=10)] | None = 1
    size: str | None = "auto"
    response_format: Literal["url", "b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = "png"
    output_compression: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    stream: bool | None = False
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=3)] | None = 0
    seed: int | None = None
    quality: str | None = None
    background: str | None = None
    moderation: str | None = None
    style: str | None = None
    input_fidelity: str | None = None
    session: str | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
    "moderation": ("auto", "low"),
    "style": (),
    "input_fidelity": ("low",),
}


class Pictures:
    """Pictures that were asked for by URL: the address can't be guessed; after an hour, or when there are too many
    bytes, the oldest go."""

    def __init__(self, keep_s: float, keep_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._keep_bytes, self._now = keep_s, keep_bytes, clock
        self._all: OrderedDict[str, tuple[float, bytes, str]] = OrderedDict()
        self._bytes = 0

    def keep(self, data: bytes, form: str) -> str:
        """The name under which it lies."""
        name = f"{secrets.token_urlsafe(24)}.{form}"
        self._all[name] = (self._now(), data, f"image/{form}")
        self._bytes += len(data)
        self._expire()
        return name

    def get(self, name: str) -> tuple[bytes, str] | None:
        """Bytes and media type, if it is still there."""
        self._expire()
        found = self._all.get(name)
        return None if found is None else found[1:]

    def _expire(self) -> None:
        while self._all:
            name, (at, data, _) = next(iter(self._all.items()))
            if self._bytes <= self._keep_bytes and self._now() - at < self._keep_s:
                return
            del self._all[name]
            self._bytes -= len(data)


@dataclass(slots=True)
class Job:
    """One picture under way."""

    running: Running
    endpoint: Images
    asked: ImageRequest
    kind: str
    size: str
    form: str


def router(state: State) -> APIRouter:
    """The routes under `/v1/images` and `/v1/files`."""
    routes = APIRouter(tags=["openai"])
    kept = Pictures(KEEP_S, KEEP_BYTES)

    async def draw(request: Request, body: dict[str, Any], kind: str) -> Response:
        served, endpoint = state.catalogue.endpoint(Images, body.get("model"))
        inputs = await _pictures(state, served, endpoint, body) if kind == "image_edit" else {}
        asked, mapped = await take(state, served, endpoint, body, ImageRequest, NEUTRAL)
        if asked.partial_images and not endpoint.out_partial:
            raise unsupported("partial_images", "this model gives no partial pictures")
        width, height = _size(endpoint, asked.size)
        for name, value in ((endpoint.width, width), (endpoint.height, height)):
            if name:
                mapped.put(served, name, value)
        inputs |= {**mapped.inputs, endpoint.prompt: asked.prompt}
        partial = endpoint.out_partial if asked.stream and asked.partial_images else ""
        with ExitStack() as stack:
            jobs: list[Job] = []
            with faults():
                for number in range(asked.n or 1):
                    running = state.book.submit(
                        served,
                        call_of(request),
                        kind.replace("image_", "images_"),
                        inputs,
                        params=mapped.params,
                        session=asked.session or request.headers.get("x-omni-session"),
                        seed=None if asked.seed is None else (asked.seed + number) % 2**63,
                        outputs=frozenset({endpoint.out_image, partial} - {""}),
                    )
                    stack.enter_context(running)
                    jobs.append(
                        Job(running, endpoint, asked, kind, f"{width}x{height}", FORMATS[asked.output_format or "png"])
                    )
            live = [job.running for job in jobs]
            if asked.stream:
                return EventStream(_events(jobs, stack.pop_all()), lambda: [r.cancel() for r in live])
            base = str(request.base_url)
            return await while_connected(request, live, _whole(jobs, kept, base))

    @routes.post("/v1/images/generations", openapi_extra=body_schema(ImageRequest))
    async def generate(request: Request) -> Response:
        """Draw a picture; with `stream` and `partial_images` it is shown on the way."""
        return await draw(request, await json_body(request), "image_generation")

    @routes.post(
        "/v1/images/edits",
        openapi_extra=form_schema(
            {"image": {"type": "string", "format": "binary"}, "prompt": {"type": "string"}}, ["image", "prompt"]
        ),
    )
    async def edit(request: Request) -> Response:
        """Draw a picture after others."""
        body = as_body(await read_form(request, state.settings.max_body_bytes), ("image",))
        for name in ("n", "partial_images", "output_compression", "seed"):
            if name in body:
                body[name] = _whole_number(body[name], name)
        if "stream" in body:
            body["stream"] = str(body["stream"]).lower() == "true"
        return await draw(request, body, "image_edit")

    @routes.get("/v1/files/{name}")
    async def picture(name: str) -> Response:
        """A picture that was asked for by URL."""
        found = kept.get(name)
        if found is None:
            raise ApiError(404, "that picture is not here, or no longer", code="file_not_found")
        return Response(found[0], media_type=found[1], headers={"cache-control": "private, max-age=3600"})

    return routes


def _whole_number(text: Any, field: str) -> int:
    if not isinstance(text, str) or not text.isdigit():
        raise bad(f"expected a whole number, got {text!r}", field, "invalid_type")
    return int(text)


def _size(endpoint: Images, size: str | None) -> tuple[int, int]:
    """Width and height. Raises ApiError naming `size`."""
    given = size if size not in (None, "auto") else (endpoint.sizes[0] if endpoint.sizes else "1024x1024")
    assert given is not None
    found = _SIZE.fullmatch(given)
    if found is None or (endpoint.sizes and given not in endpoint.sizes):
        known = f"; there is {', '.join(endpoint.sizes)}" if endpoint.sizes else ", like 1024x1024"
        raise bad(f"{given!r} is no size this model draws{known}", "size")
    width, height = int(found[1]), int(found[2])
    if max(width, height) > endpoint.max_side:
        raise bad(f"a side may have {endpoint.max_side} pixels at most", "size")
    return width, height


async def _pictures(state: State, served: Served, endpoint: Images, body: dict[str, Any]) -> dict[str, Any]:
    if not endpoint.image:
        raise ApiError(404, "this model edits no pictures", param="model", code="model_not_found")
    given = body.pop("image", None)
    if not given:
        raise bad("there is no image", "image", "missing_required_parameter")
    kind = served.inputs[endpoint.image]
    several = isinstance(kind, ListOf)
    if len(given) > 1 and not several:
        raise unsupported("image", "this model takes one image")
    found: dict[str, Any] = {endpoint.image: await load(state.media, kind, given if several else given[0], "image")}
    mask = body.pop("mask", None)
    if mask is not None:
        if not endpoint.mask:
            raise unsupported("mask", "this model takes no mask")
        found[endpoint.mask] = await load(state.media, served.inputs[endpoint.mask], mask, "mask")
    return found


async def _whole(jobs: list[Job], kept: Pictures, base: str) -> Response:
    async def one(job: Job) -> dict[str, Any]:
        made: Any = ABSENT
        while batch := await job.running.batch():
            for name, value in batch:
                made = value if name == job.endpoint.out_image else made
        error = job.running.error()
        if error is not None:
            raise error
        if made is ABSENT:
            raise ApiError(500, "the graph made no picture", code="no_output")
        data = await apng(made, job.form, job.asked.output_compression or 90)
        if job.asked.response_format == "url":
            return {"url": f"{base}v1/files/{kept.keep(data, job.form.lower())}"}
        return {"b64_json": b64(data)}

    pictures = await asyncio.gather(*(one(job) for job in jobs))
    first = jobs[0]
    answer = {"created": now(), "data": pictures, "size": first.size, "output_format": first.form.lower()}
    return Json({**answer, "background": "opaque", "quality": "auto"})


async def _events(jobs: list[Job], owner: ExitStack) -> AsyncIterator[bytes]:
    with owner:
        for job in jobs:
            number = 0
            while batch := await job.running.batch():
                for name, value in batch:
                    if value is ABSENT:
                        continue
                    if name == job.endpoint.out_image:
                        yield await _event(job, "completed", value, usage=_usage())
                    elif number < (job.asked.partial_images or 0):
                        yield await _event(job, "partial_image", value, partial_image_index=number)
                        number += 1
            error = job.running.error()
            if error is not None:
                raise error


def _usage() -> dict[str, Any]:
    details = {"image_tokens": 0, "text_tokens": 0}
    return {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, "input_tokens_details": details}


async def _event(job: Job, name: str, picture: Any, **more: Any) -> bytes:
    kind = f"{job.kind}.{name}"
    data = {
        "type": kind,
        "b64_json": b64(await apng(picture, job.form, job.asked.output_compression or 90)),
        "created_at": now(),
        "size": job.size,
        "output_format": job.form.lower(),
        "background": "opaque",
        "quality": "auto",
        **more,
    }
    return b"event: " + kind.encode() + b"\ndata: " + encode(data) + b"\n\n"
