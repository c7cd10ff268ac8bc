"""A graph that is served somewhere, as a deployment on this machine: sessions and requests over HTTP.

`connect("http://host:8000", "chat")` has the face of `omni_flow.launch`. Needs the extra `[client]`, and `[media]` for
pictures.
"""

from __future__ import annotations

import base64
import io
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_socket

from omni_flow.control.facts import Failure
from omni_flow.control.request import Outcome
from omni_flow.control.runtime.errors import InvalidInput, Overloaded, RequestFailed
from omni_flow.control.runtime.live_request import Span
from omni_flow.refs import ABSENT


class RemoteError(Exception):
    """What a server answered that no other error says. `status` 0: the connection broke; `code` as the server says."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def connect(url: str, graph: str | None = None, *, key: str | None = None, timeout: float = 600.0) -> Remote:
    """A served graph; `graph` may be left out where a server has one only.

    Raises: RemoteError: no such server, graph or key.
    """
    return Remote(url, graph, key, timeout)


class Remote:
    """One graph of a server. `with` it, or `close()` it."""

    def __init__(self, url: str, graph: str | None, key: str | None, timeout: float) -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=url, headers=self._headers, timeout=timeout)
        self._timeout = timeout
        try:
            names = [each["id"] for each in self.get("/v1/graphs")["data"]] if graph is None else [graph]
            if len(names) != 1:
                raise RemoteError(0, f"name one of the server's graphs: {', '.join(names)}")
            self.about = self.get(f"/v1/graphs/{quote(names[0], safe='')}")
        except BaseException:
            self.http.close()
            raise
        self.graph: str = self.about["id"]
        self._types = {each["name"]: each["type"] for each in self.about["placeholders"]}
        self._streams = {each["name"] for each in self.about["outputs"] if each["stream"]}
        self._outputs = [each["name"] for each in self.about["outputs"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; requests under way go on until they are closed or dropped."""
        self.http.close()

    def get(self, path: str) -> Any:
        """The JSON at a path of the server. Raises RemoteError."""
        return self._call("GET", path)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            answer = self.http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise RemoteError(0, f"{self.http.base_url}: {error}") from error
        if answer.status_code >= 400 and "error" in answer.text:
            told = answer.json().get("error", {})
            raise RemoteError(answer.status_code, told.get("message", answer.text), told.get("code"), told.get("param"))
        return answer.json()

    def session(self, id: str | None = None, params: Mapping[str, Any] | None = None) -> RemoteSession:
        """Requests that share an id and params."""
        return RemoteSession(self, id, params)

    def submit(self, **options: Any) -> RemoteRequest:
        """A request of a session of its own; see `RemoteSession.submit`."""
        return self._submit(None, {}, options)

    def status(self) -> Any:
        """Every role of the graph with its replicas, as `/health` says."""
        return self.http.get("/health").json()["graphs"][self.graph]

    def _submit(self, session: str | None, params: Mapping[str, Any], options: dict[str, Any]) -> RemoteRequest:
        start: dict[str, Any] = {"type": "start", "params": {**params, **(options.pop("params", None) or {})}}
        for name, field in (("deadline", "deadline_s"), ("seed", "seed"), ("timeline", "timeline")):
            value = options.pop(name, None)
            if value is not None:
                start[field] = value
        if session is not None:
            start["session"] = session
        start["inputs"] = {name: self.encode(name, value) for name, value in options.items() if value is not ABSENT}
        url = str(self.http.base_url.join(f"/v1/graphs/{quote(self.graph, safe='')}/stream"))
        stack = ExitStack()
        place = url.replace("http", "ws", 1)
        try:
            opening = open_socket(place, additional_headers=self._headers, open_timeout=self._timeout, max_size=None)
            socket = stack.enter_context(opening)
        except InvalidStatus as refused:
            told = _error_of(bytes(refused.response.body or b""))
            raise _raised(refused.response.status_code, told) from refused
        except (OSError, WebSocketException) as error:
            raise RemoteError(0, f"{self.http.base_url}: {error}") from error
        return RemoteRequest(self, socket, stack, start)

    def encode(self, placeholder: str, value: Any) -> Any:
        """A value as JSON, by the placeholder's type."""
        kind = self._types.get(placeholder, "any")
        if isinstance(value, np.ndarray) and kind.startswith("Audio"):
            rate = kind[6:-1]
            about = {"rate": int(rate)} if rate.isdigit() else {}
            return {"data": _b64(np.asarray(value, "<f4").tobytes()), "format": "f32", **about}
        if isinstance(value, np.ndarray) and kind == "Image":
            from PIL import Image

            out = io.BytesIO()
            Image.fromarray(value).save(out, "PNG")
            return {"data": _b64(out.getvalue())}
        if isinstance(value, np.ndarray):
            return {"dtype": value.dtype.name, "shape": list(value.shape), "data": _b64(value.tobytes())}
        if isinstance(value, (bytes, bytearray, memoryview)):
            return {"data": _b64(bytes(value))}
        return value


class RemoteSession:
    """Requests that share an id and params."""

    def __init__(self, remote: Remote, id: str | None, params: Mapping[str, Any] | None) -> None:
        self.id = id or secrets.token_hex(8)
        self.params = dict(params or {})
        self._remote = remote

    def update(self, **params: Any) -> None:
        """Change params for requests submitted from now on."""
        self.params.update(params)

    def submit(self, **options: Any) -> RemoteRequest:
        """Start a request: inputs by placeholder, and `deadline`, `params`, `seed`, `timeline`.

        Raises: InvalidInput, Overloaded, RemoteError.
        """
        return self._remote._submit(self.id, self.params, options)

    def about(self) -> dict[str, Any]:
        """What the server says of it: `turns`, `live` requests, `params`, and its `kv` by tier. Raises RemoteError."""
        about: dict[str, Any] = self._remote._call("GET", f"/v1/sessions/{quote(self.id, safe='')}")
        return about

    def close(self) -> None:
        """Forget the session at the server; cancels what is under way. Raises RemoteError if it has none."""
        self._remote._call("DELETE", f"/v1/sessions/{quote(self.id, safe='')}")


class RemoteRequest:
    """A request under way: iterate it for (output, value) as they come, or call `result()`. One thread reads it."""

    def __init__(self, remote: Remote, socket: ClientConnection, stack: ExitStack, start: dict[str, Any]) -> None:
        self._remote, self._socket, self._stack = remote, socket, stack
        self.outcome: Outcome | None = None
        self.failures: dict[str, Failure] = {}
        self._spans: list[Span] = []
        self._taken: dict[str, list[Any]] = {name: [] for name in remote._outputs}
        self._send(start)
        first = self._receive()
        if first["type"] == "error":
            self._stack.close()
            raise _raised(400, first["error"])
        self.id: str = first["id"]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.send(msgspec.json.encode(message).decode())
        except WebSocketException as error:
            raise RemoteError(0, f"the connection broke: {error}") from error

    def _receive(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._socket.recv())
        except WebSocketException as error:
            raise RemoteError(0, f"the connection broke: {error}") from error
        return found

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Outputs as they come; ends with the outcome and does not raise for it. Raises InvalidInput for a frame."""
        while self.outcome is None:
            message = self._receive()
            if message["type"] == "output":
                value = decode(message["value"])
                self._taken[message["output"]].append(value)
                yield message["output"], value
            elif message["type"] == "error":
                self._stack.close()
                self.outcome = Outcome.CANCELLED
                raise _raised(400, message["error"])
            else:
                self._end(message)

    def _end(self, message: dict[str, Any]) -> None:
        self.outcome = Outcome(message["outcome"])
        self.failures = {name: Failure("", "", cause) for name, cause in message["failures"].items()}
        self._spans = [Span(**span) for span in message.get("timeline", ())]
        self._stack.close()

    def result(self) -> dict[str, Any]:
        """All outputs: outside any stream a value or ABSENT, inside one a list. Raises RequestFailed."""
        for _ in self:
            pass
        streams = self._remote._streams
        found = {
            name: values if name in streams else (values[0] if values else ABSENT)
            for name, values in self._taken.items()
        }
        if self.outcome is not Outcome.DONE:
            raise RequestFailed(self.outcome or Outcome.CANCELLED, self.failures, found)
        return found

    def send(self, placeholder: str, value: Any) -> None:
        """Send the next frame of a streamed placeholder; the server takes 16 MiB ahead of the graph, then refuses."""
        frame = self._remote.encode(placeholder, value)
        self._send({"type": "frame", "placeholder": placeholder, "value": frame})

    def end(self, placeholder: str) -> None:
        """Say that a streamed placeholder has no more frames."""
        self._send({"type": "end", "placeholder": placeholder})

    def cancel(self) -> None:
        """End it as cancelled; iterate or ask for the result to see the outcome."""
        if self.outcome is None:
            self._send({"type": "cancel"})

    def timeline(self) -> list[Span]:
        """Its activations, once it is over, if it was submitted with `timeline=True`."""
        return list(self._spans)


def decode(value: Any) -> Any:
    """A value of an output from its JSON: sound as float32 samples, pictures as RGB, tensors as arrays."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, data = value.get("type"), value.get("data")
    if not isinstance(data, str):
        return value
    if kind == "audio":
        return np.frombuffer(base64.b64decode(data), "<i2").astype(np.float32) / np.float32(32767)
    if kind == "image":
        from PIL import Image

        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
    if kind == "tensor":
        return np.frombuffer(base64.b64decode(data), value["dtype"]).reshape(value["shape"])
    if kind == "bytes":
        return base64.b64decode(data)
    return value


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _error_of(body: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": body.decode("latin-1")[:200] or "the server refused the connection"}
    return found


def _raised(status: int, error: Mapping[str, Any]) -> Exception:
    """The error that a deployment on this machine would raise."""
    message, code, param = error.get("message", ""), error.get("code"), error.get("param")
    if code == "rate_limit_exceeded":
        return Overloaded(message)
    if param is not None:
        return InvalidInput(str(param).removeprefix("inputs."), message)
    return RemoteError(status, message, code, param)
