"""Arrays and tensors as bytes: a self-describing header and the elements in C order, little-endian.

Layout: ndim u8, length of the dtype's name u8, padding u8, the name in ASCII, ndim extents u64 LE, zeros of padding,
then the elements. The padding aligns the elements to 16 bytes where the caller knows the position. torch is used only
if somebody has already imported it: a reader without torch sees numpy.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

MAX_NDIM: Final = 32
_EIGHT_BIT: Final = ("float8_e4m3fn", "float8_e5m2")
_SIZES: Final = {"bfloat16": 2, **dict.fromkeys(_EIGHT_BIT, 1)}
_NUMPY_DTYPES: Final = {np.dtype(c).name: np.dtype(c) for c in "?bhilqBHILQefdFD"}
_NAMES: Final = {dtype: name for name, dtype in _NUMPY_DTYPES.items()}  # dtype.name takes a microsecond
_HEAD: Final = struct.Struct("<BBB")


class ArrayError(ValueError):
    """An array that has no byte form, or bytes that are no array."""


def torch_module() -> Any:
    """The torch module if it has been imported by somebody, else None."""
    return sys.modules.get("torch")


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor."""
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def pack(value: Any, offset: int) -> tuple[bytes, memoryview]:
    """Header and elements; joined and put at `offset`, the elements lie 16-byte aligned.

    Raises `ArrayError` for elements that are no numbers and for tensors that are not dense.
    """
    name, shape, raw = _torch_parts(value) if is_torch(value) else _numpy_parts(value)
    if len(shape) > MAX_NDIM:
        raise ArrayError(f"{len(shape)} dimensions; {MAX_NDIM} at most")
    encoded = name.encode()
    padding = -(offset + _HEAD.size + len(encoded) + 8 * len(shape)) % 16
    head = _HEAD.pack(len(shape), len(encoded), padding) + encoded + struct.pack(f"<{len(shape)}Q", *shape)
    return head + bytes(padding), raw


def unpack(data: memoryview, torch: bool) -> Any:
    """The array that `pack` wrote: a read-only numpy view of `data`, or a torch tensor (a copy, for it is writable).

    Raises `ArrayError` if the bytes are not exactly one array of a known dtype.
    """
    if len(data) < _HEAD.size:
        raise ArrayError("cut short")
    ndim, length, padding = _HEAD.unpack_from(data)
    start = _HEAD.size + length + 8 * ndim
    if ndim > MAX_NDIM or padding > 15 or len(data) < start + padding:
        raise ArrayError("header out of bounds")
    name = bytes(data[_HEAD.size : _HEAD.size + length]).decode("ascii", "replace")
    shape = struct.unpack_from(f"<{ndim}Q", data, _HEAD.size + length)
    raw = data[start + padding :]
    size = itemsize(name)
    if size is None:
        raise ArrayError(f"unknown dtype {name!r}")
    if len(raw) != math.prod(shape) * size:
        raise ArrayError(f"{len(raw)} bytes for {name} of shape {shape}")
    try:
        if torch and torch_module() is not None:
            return _to_torch(raw, name, shape)
        return _to_numpy(raw, name, shape)
    except (
        ValueError,
        RuntimeError,
        OverflowError,
        TypeError,
    ) as wrong:  # extents beside a 0 that no machine can index
        raise ArrayError(f"shape {shape}: {wrong}") from None


def itemsize(name: str) -> int | None:
    """Bytes of one element of the dtype of that name, or None if it is not one of numbers."""
    if name in _SIZES:
        return _SIZES[name]
    dtype = _NUMPY_DTYPES.get(name)
    return None if dtype is None else dtype.itemsize


def _numpy_parts(value: np.ndarray[Any, Any]) -> tuple[str, Sequence[int], memoryview]:
    dtype = value.dtype
    known = _NAMES.get(dtype)
    if known is not None:
        return known, value.shape, _bytes_of(value)
    if dtype.name in _SIZES:  # of ml_dtypes: numpy does not know their kind
        return dtype.name, value.shape, _bytes_of(value)
    if dtype.kind not in "biufc" or dtype.name not in _NUMPY_DTYPES:
        raise ArrayError(f"an array of {dtype} is not one of numbers")
    return dtype.name, value.shape, _bytes_of(value.astype(dtype.newbyteorder("=")))


def _bytes_of(value: np.ndarray[Any, Any]) -> memoryview:
    return np.asarray(value, order="C").reshape(-1).view(np.uint8).data


def _torch_parts(value: Any) -> tuple[str, Sequence[int], memoryview]:
    torch = torch_module()
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise ArrayError(f"a torch tensor of layout {value.layout} on {value.device} has no plain bytes")
    name = str(value.dtype).removeprefix("torch.")
    if itemsize(name) is None:
        raise ArrayError(f"a torch tensor of {name} has no byte form")
    host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return name, tuple(value.shape), memoryview(host.reshape(-1).view(torch.uint8).numpy())


def _to_numpy(raw: memoryview, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if name in _SIZES:
        ml_dtypes = sys.modules.get("ml_dtypes")
        if ml_dtypes is None:
            raise ArrayError(f"{name} needs torch or ml_dtypes to be imported here")
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    else:
        dtype = _NUMPY_DTYPES[name]
    if not raw:
        return np.zeros(shape, dtype)
    view = np.frombuffer(raw, dtype).reshape(shape)
    view.flags.writeable = False
    return view


def _to_torch(raw: memoryview, name: str, shape: tuple[int, ...]) -> Any:
    torch = torch_module()
    dtype = getattr(torch, name)
    if not raw:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
