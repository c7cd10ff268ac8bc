"""Errors of the HTTP API: one exception, OpenAI's error object, and what each error of the runtime becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from omni_flow.control.facts import Failure
from omni_flow.control.request import Outcome
from omni_flow.control.runtime.errors import InvalidInput, NoReplica, Overloaded, RequestFailed, UnknownParameter

RETRY_S = 1
"""What `Retry-After` says where nothing better is known."""

CALLERS = frozenset(("InvalidInput", "BadRequest", "PromptTooLong"))
"""What a role raises when the request is at fault, by the name of the class: nothing else of it reaches the server."""

FULL = "EngineFull"
"""What a role raises when as many requests wait for its engine as may."""

DEAD = frozenset(("EngineDied", "EngineFailed"))
"""What a role raises whose engine has died, or could not be started in place of one that had."""

LOST = "ConversationLost"
"""What a role raises that no longer keeps what a session has said."""

LONGEST = 400
"""Characters of a failure that a caller is told."""

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_OUTCOMES = {
    Outcome.FAILED: (500, "request_failed", "the request failed"),
    Outcome.CANCELLED: (409, "request_cancelled", "the request was cancelled"),
    Outcome.DEADLINE: (504, "deadline_exceeded", "the deadline came before the request was done"),
}


class ApiError(Exception):
    """What a caller is told: HTTP status, message, the field at fault (`param`) and a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        self.more = dict(more or {})

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def as_object(self) -> dict[str, Any]:
        """The value of `error` in a body, an event or a WebSocket message."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code, **self.more}

    def body(self) -> bytes:
        """A whole response body."""
        return msgspec.json.encode({"error": self.as_object()}, enc_hook=repr)


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a field that is known but that this model or server can't honour."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def too_many(message: str, retry_s: float) -> ApiError:
    """A 429 with Retry-After in whole seconds, at least one."""
    wait = str(max(1, int(retry_s + 0.999)))
    return ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": wait})


def of_fault(fault: Exception) -> ApiError | None:
    """What an error of the runtime becomes; None if it is none of a caller's."""
    if isinstance(fault, ApiError):
        return fault
    if isinstance(fault, InvalidInput):
        return ApiError(400, str(fault), param=fault.name, code="invalid_input")
    if isinstance(fault, UnknownParameter):
        return ApiError(400, str(fault), param=fault.name, code="unknown_parameter")
    if isinstance(fault, Overloaded):
        return too_many(str(fault), RETRY_S)
    if isinstance(fault, NoReplica):
        return ApiError(503, str(fault), code="no_replica", headers={"retry-after": str(RETRY_S)})
    if isinstance(fault, RequestFailed):
        return of_outcome(fault.outcome, fault.failures)
    return None


def brief(failure: Failure | str) -> str:
    """A failure in one line for a caller: of a long cause, as an engine's last output, the log has the rest."""
    text = " ".join(str(failure).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def of_outcome(outcome: Outcome | None, failures: Mapping[str, Failure]) -> ApiError:
    """What a request that is not done becomes; `failures` by output."""
    status, code, text = _OUTCOMES[outcome or Outcome.CANCELLED]
    told = {failure.cause.partition(": ")[::2] for failure in failures.values()}
    kinds = {kind for kind, _ in told}
    if outcome is Outcome.FAILED and kinds and kinds <= CALLERS:
        code = "context_length_exceeded" if kinds == {"PromptTooLong"} else "invalid_input"
        return ApiError(400, "; ".join(sorted(brief(why) for _, why in told)), code=code)
    if outcome is Outcome.FAILED and kinds == {FULL}:
        return too_many("; ".join(sorted(brief(why) for _, why in told)), RETRY_S)
    if outcome is Outcome.FAILED and kinds == {LOST}:
        return ApiError(409, "; ".join(sorted(brief(why) for _, why in told)), code="conversation_lost")
    headers: dict[str, str] = {}
    if outcome is Outcome.FAILED and kinds and kinds <= DEAD:
        status, code, headers = 503, "engine_died", {"retry-after": str(RETRY_S)}
    texts = {name: brief(failure) for name, failure in failures.items()}
    causes = "; ".join(sorted(set(texts.values())))
    message = f"{text}: {causes}" if causes else text
    return ApiError(status, message, code=code, headers=headers, more={"failures": texts} if texts else None)


_PLACE = re.compile(r" - at `(?:key` in `)?\$\.?(.*?)`$", re.DOTALL)
_FIELD = re.compile(r"field `([^`]*)`")


def of_validation(wrong: msgspec.ValidationError, within: str = "") -> ApiError:
    """A 400 that names the field msgspec complains of, as a path like `messages[0].role`."""
    text = str(wrong)
    place = ""
    found = _PLACE.search(text)
    if found is not None:
        place, text = found.group(1), text[: found.start()]
    code = "invalid_type"
    inner = _FIELD.search(text)
    if inner is not None and ("unknown field" in text or "missing required field" in text):
        place = f"{place}.{inner.group(1)}" if place else inner.group(1)
        code = "unknown_parameter" if "unknown field" in text else "missing_required_parameter"
    place = place.replace("[...]", "[]")
    if within:
        place = f"{within}.{place}" if place else within
    if code == "unknown_parameter":
        text = f"there is no field {place!r}"
    elif code == "missing_required_parameter":
        text = f"the field {place!r} is missing"
    elif place:
        text = f"{place}: {text[0].lower()}{text[1:]}"
    return ApiError(400, text, param=place or None, code=code)
