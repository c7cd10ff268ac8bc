"""Multipart bodies: fields of text and files, each read whole within the body limit."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from omni_flow.serve.errors import ApiError, bad
from omni_flow.serve.http import refuse_packed
from omni_flow.serve.media.service import Upload

MAX_PARTS = 128


async def read_form(request: Request, most: int) -> dict[str, list[Any]]:
    """Values by name (text, or Upload); `name[]` is `name`. Raises ApiError."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise ApiError(415, "expected multipart/form-data", code="unsupported_media_type")
    refuse_packed(request)
    found: dict[str, list[Any]] = {}
    try:
        async with request.form(max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=most) as form:
            for name, part in form.multi_items():
                value: Any = part
                if isinstance(part, UploadFile):
                    value = Upload(await part.read(), part.filename or "", part.content_type or "")
                found.setdefault(name.removesuffix("[]"), []).append(value)
    except MultiPartException as error:
        raise bad(f"the form can't be read: {error.message}", code="invalid_form") from error
    return found


def as_body(form: dict[str, list[Any]], lists: tuple[str, ...] = ()) -> dict[str, Any]:
    """One value for each name, but all of those in `lists`; numbers and switches stay text. Raises ApiError."""
    body: dict[str, Any] = {}
    for name, values in form.items():
        if name in lists:
            body[name] = values
        elif len(values) > 1:
            raise bad(f"{name!r} stands there {len(values)} times", name)
        else:
            body[name] = values[0]
    return body
