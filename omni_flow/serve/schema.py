"""OpenAPI of bodies that msgspec reads: FastAPI has the routes, the structs have the schema."""

from __future__ import annotations

from typing import Any

import msgspec

_ERROR = {
    "description": "An error",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}


def inlined(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type with no references to elsewhere."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="#/{name}")

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                return resolve(parts[node["$ref"].removeprefix("#/")])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    found: dict[str, Any] = resolve(schema)
    return found


def body_schema(kind: Any, multipart: bool = False) -> dict[str, Any]:
    """`openapi_extra` for a route that takes `kind` as JSON; `multipart`: or as a form."""
    content: dict[str, Any] = {"application/json": {"schema": inlined(kind)}}
    if multipart:
        content["multipart/form-data"] = {"schema": {"type": "object", "additionalProperties": True}}
    return {"requestBody": {"required": True, "content": content}, "responses": {"default": _ERROR}}


def form_schema(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """`openapi_extra` for a route that takes a multipart form."""
    schema = {"type": "object", "properties": properties, "required": required}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}, "responses": {"default": _ERROR}}
