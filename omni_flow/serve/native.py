"""The native API: requests of any graph with all its placeholders and outputs.

`POST /v1/graphs/{graph}/requests` takes JSON or multipart and answers with JSON, or with events when `stream` is true.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from omni_flow.control.request import Outcome
from omni_flow.control.runtime.errors import RequestFailed
from omni_flow.refs import ABSENT
from omni_flow.serve.errors import ApiError, bad, of_outcome, of_validation
from omni_flow.serve.forms import read_form
from omni_flow.serve.http import EventStream, Json, call_of, encode, faults, json_body, named_event, while_connected
from omni_flow.serve.media.service import Upload
from omni_flow.serve.running import Record, Running, span_object
from omni_flow.serve.schema import body_schema
from omni_flow.serve.served import Served
from omni_flow.serve.state import Feed, State
from omni_flow.serve.values import dump, load

ENDPOINT = "graph"


class Submission(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a graph. `inputs`: by placeholder; a streamed one takes the list of its frames."""

    inputs: dict[str, Any] = {}
    params: dict[str, Any] = {}
    session: str | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    outputs: list[str] | None = None
    stream: bool = False
    timeline: bool = False


def read_submission(body: Any) -> Submission:
    """Raises ApiError naming the field."""
    try:
        return msgspec.convert(body, Submission)
    except msgspec.ValidationError as wrong:
        raise of_validation(wrong) from wrong


async def multipart_submission(request: Request, most: int) -> Submission:
    """A multipart body: the part `request` is JSON as above, every other part is the input of its name."""
    form = await read_form(request, most)
    body: dict[str, Any] = {}
    for part in form.pop("request", []):
        try:
            body = msgspec.json.decode(part.data if isinstance(part, Upload) else part)
        except msgspec.DecodeError as error:
            raise bad(f"no JSON: {error}", "request", "invalid_json") from error
    found = read_submission(body)
    found.inputs = {**found.inputs, **{name: v if len(v) > 1 else v[0] for name, v in form.items()}}
    return found


async def take_inputs(state: State, served: Served, raw: Mapping[str, Any]) -> tuple[dict[str, Any], Feed]:
    """Values of placeholders, and the frames of streamed ones. Raises ApiError naming the field."""
    whole: dict[str, Any] = {}
    frames: dict[str, list[Any]] = {}
    for name, value in raw.items():
        if name not in served.inputs:
            known = ", ".join(served.inputs) or "none"
            raise bad(f"the graph has no placeholder {name!r}; it has {known}", f"inputs.{name}", "unknown_parameter")
        kind, field = served.inputs[name], f"inputs.{name}"
        if name in served.pushed:
            if not isinstance(value, list):
                value = [value]
            frames[name] = [await load(state.media, kind, frame, f"{field}[{i}]") for i, frame in enumerate(value)]
        else:
            whole[name] = await load(state.media, kind, value, field)
    return whole, Feed(frames)


def wanted_outputs(served: Served, names: list[str] | None) -> frozenset[str] | None:
    """Raises ApiError naming `outputs`."""
    if names is None:
        return None
    for name in names:
        if name not in served.kinds:
            raise bad(f"the graph has no output {name!r}; it has {', '.join(served.kinds)}", "outputs")
    if not names:
        raise bad("name at least one output", "outputs")
    return frozenset(names)


def router(state: State) -> APIRouter:
    """The routes under `/v1/graphs` and `/v1/requests`."""
    routes = APIRouter(tags=["graphs"])

    @routes.get("/v1/graphs")
    async def list_graphs() -> Response:
        """All graphs of this server."""
        return Json({"object": "list", "data": [s.describe() for s in state.catalogue.graphs.values()]})

    @routes.get("/v1/graphs/{graph}")
    async def show_graph(graph: str) -> Response:
        """One graph: placeholders, params, outputs, roles, endpoints."""
        return Json(state.catalogue.graph(graph).describe())

    @routes.post("/v1/graphs/{graph}/requests", openapi_extra=body_schema(Submission, multipart=True))
    async def submit(graph: str, request: Request) -> Response:
        """Run a request; `stream: true` gives its outputs as events while they are made."""
        served = state.catalogue.graph(graph)
        call = call_of(request)
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            asked = await multipart_submission(request, state.settings.max_body_bytes)
        else:
            asked = read_submission(await json_body(request))
        inputs, feed = await take_inputs(state, served, asked.inputs)
        for name in served.pushed:  # no more will come
            feed.frames.setdefault(name, [])
        outputs = wanted_outputs(served, asked.outputs)
        session = asked.session or request.headers.get("x-omni-session")
        with faults():
            running = state.book.submit(
                served,
                call,
                ENDPOINT,
                inputs,
                params=asked.params,
                session=session,
                deadline_s=asked.deadline_s,
                seed=asked.seed,
                timeline=asked.timeline,
                outputs=outputs,
            )
        if asked.stream:
            return EventStream(_events(state, running, feed, asked.timeline), running.cancel)
        with running:
            return await while_connected(request, [running], _whole(state, running, feed, asked.timeline))

    @routes.get("/v1/requests")
    async def list_requests(request: Request) -> Response:
        """The caller's requests: those under way, and the last that ended, newest first."""
        call = call_of(request)
        every: list[Running | Record] = [*state.book.recent, *state.book.live.values()]
        mine = [r.as_object() for r in reversed(every) if r.tenant == call.tenant]
        return Json({"object": "list", "data": mine})

    @routes.get("/v1/requests/{id}")
    async def show_request(id: str, request: Request) -> Response:
        """One request with its timeline, if that was noted."""
        return Json(state.book.find(id, call_of(request)).as_object(timeline=True))

    @routes.delete("/v1/requests/{id}")
    async def cancel_request(id: str, request: Request) -> Response:
        """Cancel a request; `cancelled` is false if it had ended before."""
        running = state.book.find(id, call_of(request))
        return Json({"id": id, "object": "graph.request", "cancelled": running.cancel()})

    return routes


async def _whole(state: State, running: Running, feed: Feed, timeline: bool) -> Response:
    async with state.feeding(feed, running):
        try:
            outputs = await running.result()
        except RequestFailed as failed:
            error = of_outcome(failed.outcome, failed.failures)
            partial = {n: await dump(running.served.kinds[n], v) for n, v in failed.partial.items() if v is not ABSENT}
            error.more |= {"request": running.id, "partial": partial}
            raise error from failed
    kinds = running.served.kinds
    answer: dict[str, Any] = {
        "id": running.id,
        "object": "graph.request",
        "graph": running.served.name,
        "session": running.session.id if running.session is not None else None,
        "outcome": Outcome.DONE,
        "outputs": {n: v if type(v) is str else await dump(kinds[n], v) for n, v in outputs.items()},
        "absent": [n for n, v in outputs.items() if v is ABSENT],
    }
    if timeline:
        answer["timeline"] = [span_object(span) for span in running.live.spans]
    return Json(encode(answer))


async def _events(state: State, running: Running, feed: Feed, timeline: bool) -> AsyncIterator[bytes]:
    with running:
        yield named_event("request", {"id": running.id, "graph": running.served.name})
        kinds = running.served.kinds
        heads = {name: b'event: output\ndata: {"output":' + encode(name) + b',"value":' for name in kinds}
        async with state.feeding(feed, running):
            while batch := await running.batch():
                parts: list[bytes] = []
                for name, value in batch:
                    plain = value if type(value) is str else await dump(kinds[name], value)
                    parts += (heads[name], encode(plain), b"}\n\n")
                yield b"".join(parts)
        end: dict[str, Any] = {"id": running.id, "outcome": running.outcome, "failures": running.failures()}
        if timeline:
            end["timeline"] = [span_object(span) for span in running.live.spans]
        error: ApiError | None = running.error()
        if error is not None:
            end["error"] = error.as_object()
        yield named_event("end", end)
