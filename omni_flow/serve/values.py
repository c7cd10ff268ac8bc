"""Values of fields as JSON, in and out.

In: by the placeholder's type. Sound, pictures and bytes are data URLs or objects with `data` (base64) or `url`; tensors
are nested lists or {"dtype", "shape", "data"}. Out: text and numbers as they are; all else an object with a `type`.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import sys
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.control.types import (
    KV,
    Audio,
    Bytes,
    Image,
    ListOf,
    OneOf,
    Record,
    Scalar,
    Tensor,
    Text,
    Type,
    is_pydantic,
)
from omni_flow.refs import ABSENT, KVRef, TensorRef
from omni_flow.serve.errors import ApiError, bad, of_validation
from omni_flow.serve.media.service import Media, Upload, unbase64

THREAD_BYTES = 65_536
"""A picture of more bytes is compressed off the loop."""


# ---- in -----------------------------------------------------------------------------------------------------


async def load(media: Media, type_: Type | None, raw: Any, field: str) -> Any:
    """The value of a placeholder. Raises ApiError naming `field`."""
    if isinstance(type_, Text):
        return _text(raw, field)
    if isinstance(type_, Image):
        return await media.picture(raw, field)
    if isinstance(type_, Audio):
        return await media.sound(raw, type_.rate, field)
    if isinstance(type_, Bytes):
        return await media.blob(raw, field)
    if isinstance(type_, Tensor):
        return _checked(type_, _tensor(type_, raw, field), field)
    if isinstance(type_, KV):
        raise bad("a KV cache can't be sent", field)
    if isinstance(type_, ListOf):
        if not isinstance(raw, list):
            raise bad(f"expected a list, got {type(raw).__name__}", field)
        return [await load(media, type_.item, item, f"{field}[{i}]") for i, item in enumerate(raw)]
    if isinstance(type_, OneOf):
        return await _first_that_fits(media, type_, raw, field)
    if isinstance(raw, Upload):
        raw = _json(raw, field)
    if isinstance(type_, Record):
        return _record(type_.kind, raw, field)
    if isinstance(type_, Scalar) and type_.kind is float and type(raw) is int:
        raw = float(raw)
    return raw if type_ is None else _checked(type_, raw, field)


def _text(raw: Any, field: str) -> str:
    if isinstance(raw, Upload):
        try:
            return raw.data.decode()
        except UnicodeDecodeError as error:
            raise bad(f"no UTF-8 text: {error.reason} at byte {error.start}", field) from error
    if type(raw) is not str:
        raise bad(f"expected text, got {type(raw).__name__}", field, "invalid_type")
    return raw


def _json(raw: Upload, field: str) -> Any:
    try:
        return msgspec.json.decode(raw.data)
    except msgspec.DecodeError as error:
        raise bad(f"no JSON: {error}", field, "invalid_json") from error


def _checked(type_: Type, value: Any, field: str) -> Any:
    wrong = type_.mismatch(value)
    if wrong is not None:
        raise bad(wrong, field, "invalid_type")
    return value


async def _first_that_fits(media: Media, type_: OneOf, raw: Any, field: str) -> Any:
    why: list[str] = []
    # Text fits any text, so it comes last.
    for option in sorted(type_.options, key=lambda option: isinstance(option, Text)):
        try:
            return await load(media, option, raw, field)
        except ApiError as error:
            why.append(error.message)
    raise bad(f"expected {type_}: {'; '.join(why)}", field, "invalid_type")


def _record(kind: Any, raw: Any, field: str) -> Any:
    if is_pydantic(kind):
        try:
            return kind.model_validate(raw)
        except ValueError as error:
            raise bad(str(error), field, "invalid_type") from error
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise of_validation(error, field) from error


def _tensor(type_: Tensor, raw: Any, field: str) -> NDArray[Any]:
    try:
        if isinstance(raw, Upload):
            return np.asarray(np.load(io.BytesIO(raw.data), allow_pickle=False))
        if isinstance(raw, dict):
            dtype = np.dtype(raw.get("dtype") or type_.dtype or "float32")
            if dtype.hasobject:
                raise bad("a tensor holds numbers", f"{field}.dtype")
            data = unbase64(str(raw.get("data", "")), f"{field}.data")
            return np.frombuffer(data, dtype).reshape(tuple(raw.get("shape", (-1,))))
        found = np.asarray(raw, None if type_.dtype is None else np.dtype(type_.dtype))
    except (ValueError, TypeError, EOFError, OverflowError) as error:
        raise bad(f"no tensor: {error}", field) from error
    if found.dtype.hasobject or found.dtype.kind in "US":
        raise bad(f"expected numbers in lists of equal lengths, got {type(raw).__name__}", field, "invalid_type")
    return found


# ---- out ----------------------------------------------------------------------------------------------------


def pcm16(samples: NDArray[np.float32]) -> bytes:
    """Samples in [-1, 1] as 16-bit little-endian; louder ones are clipped."""
    return (np.clip(samples, -1.0, 1.0) * np.float32(32767)).astype("<i2").tobytes()


def png(picture: NDArray[np.uint8], form: str = "PNG", quality: int = 90) -> bytes:
    """RGB of (height, width, 3) as a PNG, JPEG or WEBP file."""
    from PIL import Image as Pictures

    out = io.BytesIO()
    options: dict[str, Any] = {"quality": quality} if form != "PNG" else {"compress_level": 3}
    Pictures.fromarray(np.ascontiguousarray(picture)).save(out, form, **options)
    return out.getvalue()


async def apng(picture: NDArray[np.uint8], form: str = "PNG", quality: int = 90) -> bytes:
    """`png`, off the loop if the picture is large."""
    if picture.nbytes > THREAD_BYTES:
        return await asyncio.to_thread(png, picture, form, quality)
    return png(picture, form, quality)


def b64(data: bytes) -> str:
    """Base64 text."""
    return base64.b64encode(data).decode("ascii")


async def dump(type_: Type | None, value: Any) -> Any:
    """What msgspec can write as JSON for a value; `null` for ABSENT."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if value is ABSENT:
        return None
    if kind is list or kind is tuple:
        item = type_.item if isinstance(type_, ListOf) else type_
        return [await dump(item, each) for each in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"type": "bytes", "data": b64(bytes(value))}
    if isinstance(value, np.ndarray):
        return await _dump_array(type_, value)
    if _is_torch(value):
        tensor = value.detach().cpu()
        name = str(tensor.dtype).removeprefix("torch.")
        return _tensor_object(tensor.float().numpy() if name == "bfloat16" else tensor.numpy())
    return _dump_other(value)


async def _dump_array(type_: Type | None, value: NDArray[Any]) -> Any:
    if isinstance(type_, Audio):
        return {"type": "audio", "format": "pcm16", "rate": type_.rate, "data": b64(pcm16(value))}
    if isinstance(type_, Image):
        height, width = value.shape[:2]
        return {
            "type": "image",
            "format": "png",
            "width": width,
            "height": height,
            "data": b64(await apng(value)),
        }
    return _tensor_object(value)


def _tensor_object(value: NDArray[Any]) -> dict[str, Any]:
    return {"type": "tensor", "dtype": value.dtype.name, "shape": list(value.shape), "data": b64(value.tobytes())}


def _dump_other(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (KVRef, TensorRef)):
        return {"type": type(value).__name__, "text": repr(value)}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, (msgspec.Struct, dict)) or dataclasses.is_dataclass(value):
        return msgspec.to_builtins(value, enc_hook=_inner, str_keys=True)
    return repr(value)


def _inner(value: Any) -> Any:
    """What lies inside records and dicts and is none of JSON's own."""
    if isinstance(value, np.ndarray):
        return _tensor_object(value)
    return _dump_other(value)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
