"""Settings of an engine role from the environment, so that a graph need not be edited for another machine."""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec

from omni_flow.compute.errors import BadRequest
from omni_flow.compute.sglang.config import EngineConfig

_OWN: Final = ("cache_tokens", "l2_tokens")


def role_settings(variable: str) -> dict[str, Any]:
    """Arguments of an `EngineRole` from an environment variable with a JSON object, such as `{"max_tokens": 131072,
    "l2_tokens": 500000}`: its own `cache_tokens` and `l2_tokens`, and as `engine` fields of `EngineConfig` (all but
    `model`). Empty where the variable is empty or not set.

    Raises:
        BadRequest: names the variable, and the field that is unknown, of the wrong type or out of range.
        SystemRefusal: the CUDA driver gives no answer.
    """
    text = os.environ.get(variable, "")
    if not text.strip():
        return {}
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        own: dict[str, Any] = {name: given.pop(name) for name in _OWN if name in given}
        for name, value in own.items():
            if type(value) is not int or value < 0:
                raise BadRequest(f"{name} is {value!r}", "give tokens, 0 or more")
        if "model" in given:
            raise BadRequest("model is the role's own argument")
        msgspec.convert({"model": "", "dtype": "float32"} | given, EngineConfig)  # the checkpoint is not looked at here
    except (msgspec.MsgspecError, BadRequest) as wrong:
        raise BadRequest(f"{variable}: {wrong}", "give a JSON object with fields of EngineConfig") from wrong
    return {**own, "engine": given}
