"""What the endpoints of OpenAI's API share: which fields go where, and what is refused rather than passed over."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from omni_flow.control.types import Scalar, Type
from omni_flow.serve.endpoints import Endpoint
from omni_flow.serve.errors import bad, of_validation, unsupported
from omni_flow.serve.served import Served
from omni_flow.serve.state import State
from omni_flow.serve.values import load

S = TypeVar("S", bound=msgspec.Struct)

PASSED_OVER = frozenset(
    ("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
)
"""Fields that only matter to OpenAI's own service: accepted by every endpoint, without effect."""


@dataclass(slots=True)
class Mapped:
    """What the mapping took from a request: values of placeholders and of params."""

    inputs: dict[str, Any]
    params: dict[str, Any]

    def put(self, served: Served, target: str, value: Any) -> None:
        """Give a value to a placeholder or a param, as it is."""
        (self.inputs if target in served.inputs else self.params)[target] = value


async def take(
    state: State,
    served: Served,
    endpoint: Endpoint,
    body: dict[str, Any],
    kind: type[S],
    neutral: Mapping[str, tuple[Any, ...]],
) -> tuple[S, Mapped]:
    """The request as a `kind`, and what of it the endpoint's mapping gives to the graph.

    Raises ApiError naming a field that is wrong, unknown, or that this model does nothing with: those of `neutral`
    unless they are mapped or have one of the values there, which say what happens anyway.
    """
    for name in (*endpoint.ignores, *PASSED_OVER):
        body.pop(name, None)
    own = {name: body.pop(name, None) for name in endpoint.fields if name not in kind.__struct_fields__}
    asked = read(body, kind)
    for name, same in neutral.items():
        value = getattr(asked, name)
        if value is not None and value not in same and name not in endpoint.fields:
            raise unsupported(name, f"this model does nothing with {name!r}; leave it out")
    mapped = Mapped({}, {})
    for name, target in endpoint.fields.items():
        value = own[name] if name in own else body.get(name)
        if value is None:
            continue
        if target in served.inputs:
            mapped.inputs[target] = await load(state.media, served.inputs[target], value, name)
        else:
            mapped.params[target] = _param(served, target, value, name)
    return asked, mapped


def _param(served: Served, target: str, value: Any, field: str) -> Any:
    """A field's value for a param. Raises ApiError naming the field if it isn't of the param's type."""
    kind = served.graph.params[target].type
    if isinstance(kind, Scalar) and kind.kind is float and type(value) is int:
        return float(value)
    mismatch = kind.mismatch(value) if isinstance(kind, Type) else None
    if mismatch is not None:
        raise bad(mismatch, field, "invalid_type")
    return value


def read(body: dict[str, Any], kind: type[S]) -> S:
    """A request. Raises ApiError naming the field."""
    try:
        return msgspec.convert(body, kind, str_keys=True)
    except msgspec.ValidationError as wrong:
        raise of_validation(wrong) from wrong


def new_id(prefix: str) -> str:
    """An id as OpenAI's look."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since the epoch, as `created` has them."""
    return int(time.time())


class Stops:
    """Cuts text at the first of some strings, though they may lie across pieces. Holds back what may become one."""

    __slots__ = ("_held", "_stops", "cut")

    def __init__(self, stops: list[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.cut = False

    def __call__(self, piece: str) -> str:
        """What of the text so far can be shown now."""
        if not self._stops:
            return piece
        if self.cut:
            return ""
        text = self._held + piece
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.cut = True
            return text[: min(places)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, at the end."""
        held, self._held = ("" if self.cut else self._held), ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a start of `stop`, and not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
