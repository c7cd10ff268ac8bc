"""What the endpoints of OpenAI's API share: which fields go where, and what is refused rather than passed over."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from omni_flow.control.types import Scalar
from omni_flow.serve.endpoints import Endpoint
from omni_flow.serve.errors import of_validation, unsupported
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


async def take_mapped(state: State, served: Served, endpoint: Endpoint, body: dict[str, Any]) -> Mapped:
    """Take the mapped and the ignored fields out of `body`. Raises ApiError naming a field."""
    found = Mapped({}, {})
    for name, target in endpoint.fields.items():
        value = body.pop(name, None)
        if value is None:
            continue
        if target in served.inputs:
            found.inputs[target] = await load(state.media, served.inputs[target], value, name)
        else:
            kind = served.graph.params[target].type
            whole = isinstance(kind, Scalar) and kind.kind is float and type(value) is int
            found.params[target] = float(value) if whole else value
    for name in (*endpoint.ignores, *PASSED_OVER):
        body.pop(name, None)
    return found


def read(body: dict[str, Any], kind: type[S]) -> S:
    """The rest of a request. Raises ApiError naming the field."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as wrong:
        raise of_validation(wrong) from wrong


def refuse(asked: Any, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError for a field that this model does nothing with, unless it says what happens anyway."""
    for name, same in neutral.items():
        value = getattr(asked, name)
        if value is not None and value not in same:
            raise unsupported(name, f"this model does nothing with {name!r}; leave it out")


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
