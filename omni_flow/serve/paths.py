"""Which paths an endpoint is served under."""

from __future__ import annotations

from omni_flow.serve.endpoints import (
    ChatCompletions,
    Completions,
    Endpoint,
    Images,
    Realtime,
    Speech,
    Transcriptions,
)

PATHS: dict[type[Endpoint], str] = {
    ChatCompletions: "/v1/chat/completions",
    Completions: "/v1/completions",
    Speech: "/v1/audio/speech",
    Transcriptions: "/v1/audio/transcriptions",
    Images: "/v1/images/generations",
    Realtime: "/v1/realtime",
}


def paths_of(endpoint: Endpoint) -> list[str]:
    """The paths, method first."""
    path = PATHS[type(endpoint)]
    found = [f"{'WS' if isinstance(endpoint, Realtime) else 'POST'} {path}"]
    if isinstance(endpoint, Images) and endpoint.image:
        found.append("POST /v1/images/edits")
    return found
