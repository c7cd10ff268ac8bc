"""Settings of an engine from the environment, so that a graph need not be edited for another machine."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from omni_flow.compute.errors import BadRequest
from omni_flow.compute.sglang.config import EngineConfig


def engine_settings(variable: str) -> dict[str, Any]:
    """Fields of `EngineConfig` (all but `model`) from an environment variable with a JSON object, such as
    `{"max_tokens": 131072}`: what an `EngineRole` takes as `engine`. None where the variable is empty or not set.

    Raises:
        BadRequest: names the variable, and the field that is unknown, of the wrong type or out of range.
    """
    text = os.environ.get(variable, "")
    if not text.strip():
        return {}
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        if "model" in given:
            raise BadRequest("model is the role's own argument")
        unasked = {"model": "", "device": "cpu", "dtype": "float32"}  # neither driver nor checkpoint is looked at here
        msgspec.convert(unasked | given, EngineConfig)
    except (msgspec.MsgspecError, BadRequest) as wrong:
        raise BadRequest(f"{variable}: {wrong}", "give a JSON object with fields of EngineConfig") from wrong
    return given
