"""Types of fields: what a value must be, checked for each value at run time and between declarations by lint.

A type is a small frozen object; `mismatch(value)` says in words what is wrong, or None. `fits.py` compares two types,
`annotation.py` makes types of annotations. Nothing here imports torch: a tensor is recognised by the module that is
already loaded.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from omni_flow.control.declare import DeclarationError
from omni_flow.refs import ABSENT, KVRef, TensorRef

Dim = int | str | None


def _torch_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def describe(value: object) -> str:
    """A short text for what a value is: its kind, and dtype and shape of a tensor."""
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype.name} array of shape {value.shape}"
    if _torch_tensor(value):
        tensor: Any = value
        return f"torch {str(tensor.dtype)[6:]} tensor of shape {tuple(tensor.shape)}"
    if isinstance(value, TensorRef):
        return f"{value.dtype} tensor of shape {tuple(value.shape)}"
    if value is ABSENT:
        return "ABSENT"
    if value is None or isinstance(value, (bool, int, float)):
        return f"{type(value).__name__} {value!r}"[:60]
    return type(value).__name__


class Type:
    """Base of all types. Two types are equal when they accept the same values."""

    __slots__ = ()

    def mismatch(self, value: object) -> str | None:
        """None if the value is of this type, else "expected ..., got ..."."""
        return None if self.accepts(value) else f"expected {self}, got {describe(value)}"

    def accepts(self, value: object) -> bool:
        """Whether the value is of this type."""
        raise NotImplementedError

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, slots=True)
class Anything(Type):
    """No statement: every value fits, and a field of this type fits every slot."""

    __str__ = Type.__str__

    def mismatch(self, value: object) -> str | None:
        return None

    def accepts(self, value: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Text(Type):
    """A str."""

    __str__ = Type.__str__

    def mismatch(self, value: object) -> str | None:
        return None if type(value) is str else Type.mismatch(self, value)

    def accepts(self, value: object) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class Bytes(Type):
    """bytes, bytearray or a memoryview; a reader in another process sees bytes."""

    __str__ = Type.__str__

    def mismatch(self, value: object) -> str | None:
        return None if type(value) is bytes else Type.mismatch(self, value)

    def accepts(self, value: object) -> bool:
        return isinstance(value, (bytes, bytearray, memoryview))


@dataclass(frozen=True, slots=True)
class Scalar(Type):
    """One of Python's int, float, bool or None (`kind`). An int fits a float; a bool does not fit an int."""

    kind: type

    def accepts(self, value: object) -> bool:
        own = type(value)
        if own is self.kind:
            return True
        if self.kind is float:
            return own is int or isinstance(value, np.floating)
        return self.kind is int and isinstance(value, np.integer)

    def __str__(self) -> str:
        return "None" if self.kind is type(None) else self.kind.__name__


@dataclass(frozen=True, slots=True)
class Json(Type):
    """None, bool, int, float, str, and lists and string-keyed dicts of them; only the outermost level is looked at."""

    __str__ = Type.__str__

    def accepts(self, value: object) -> bool:
        return value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))


@dataclass(frozen=True, slots=True)
class Tokens(Type):
    """Token ids: a list of ints or a one-dimensional integer array or tensor."""

    __str__ = Type.__str__

    def accepts(self, value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return all(type(v) is int for v in value)
        return _is_tensor(value) and _dtype(value).startswith(("int", "uint")) and len(_shape(value)) == 1


@dataclass(frozen=True, slots=True)
class KV(Type):
    """The KV cache of a sequence, by reference (`KVRef`)."""

    __str__ = Type.__str__

    def accepts(self, value: object) -> bool:
        return isinstance(value, KVRef)


@dataclass(frozen=True, slots=True)
class Image(Type):
    """A picture: numpy uint8 of shape (height, width, 3), RGB."""

    __str__ = Type.__str__

    def accepts(self, value: object) -> bool:
        if not isinstance(value, (np.ndarray, TensorRef)):
            return False
        return len(value.shape) == 3 and value.shape[2] == 3 and _dtype(value) == "uint8"


@dataclass(frozen=True, slots=True)
class Audio(Type):
    """Mono sound: numpy float32 of one dimension, in [-1, 1]. `rate` is in Hz; None leaves it open."""

    rate: int | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and (not isinstance(self.rate, int) or isinstance(self.rate, bool) or self.rate < 1):
            raise DeclarationError("rate", "a sample rate in Hz", self.rate)

    def accepts(self, value: object) -> bool:
        return isinstance(value, (np.ndarray, TensorRef)) and len(value.shape) == 1 and _dtype(value) == "float32"

    def __str__(self) -> str:
        return "Audio" if self.rate is None else f"Audio({self.rate})"


@dataclass(frozen=True, slots=True)
class Tensor(Type):
    """A numpy array or torch tensor (or the `TensorRef` of one).

    `dtype` is a numpy, ml_dtypes or torch name, a numpy or torch dtype, or None for any. `shape` is None for any, or a
    tuple in which an int stands for itself, None for any extent, and a str for an extent that is the same wherever the
    str occurs in this shape.
    """

    dtype: Any = None
    shape: tuple[Dim, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        if self.shape is None:
            return
        if not isinstance(self.shape, (tuple, list)):
            raise DeclarationError("shape", "a tuple of int, str or None", self.shape)
        for extent in self.shape:
            if isinstance(extent, bool) or not (extent is None or isinstance(extent, (int, str))):
                raise DeclarationError("shape", "a tuple of int, str or None", self.shape)
        object.__setattr__(self, "shape", tuple(self.shape))

    def accepts(self, value: object) -> bool:
        if not _is_tensor(value):
            return False
        return (self.dtype is None or _dtype(value) == self.dtype) and (
            self.shape is None or _matches(self.shape, _shape(value))
        )

    def __str__(self) -> str:
        if self.dtype is None and self.shape is None:
            return "Tensor"
        dtype = "any" if self.dtype is None else self.dtype
        return f"Tensor({dtype})" if self.shape is None else f"Tensor({dtype}, {_shape_text(self.shape)})"


@dataclass(frozen=True, slots=True)
class ListOf(Type):
    """A list (or tuple) whose items are all of one type."""

    item: Type

    def mismatch(self, value: object) -> str | None:
        if not isinstance(value, (list, tuple)):
            return f"expected {self}, got {describe(value)}"
        if isinstance(self.item, Anything):
            return None
        for i, item in enumerate(value):
            text = self.item.mismatch(item)
            if text is not None:
                return f"item {i}: {text}"
        return None

    def accepts(self, value: object) -> bool:
        return self.mismatch(value) is None

    def __str__(self) -> str:
        return f"list[{self.item}]"


@dataclass(frozen=True, slots=True)
class OneOf(Type):
    """A value of any of several types."""

    options: tuple[Type, ...]

    def accepts(self, value: object) -> bool:
        return any(option.mismatch(value) is None for option in self.options)

    def __str__(self) -> str:
        return " | ".join(str(option) for option in self.options)


@dataclass(frozen=True, slots=True)
class Record(Type):
    """An instance of a msgspec Struct, a pydantic model or a dataclass (`kind`). Fields are checked when decoded."""

    kind: type

    def accepts(self, value: object) -> bool:
        return isinstance(value, self.kind)

    def __str__(self) -> str:
        return self.kind.__name__


def check(type_: Type | None, value: object) -> str | None:
    """None if `value` is of `type_` (None: no statement), else "expected ..., got ..."."""
    return None if type_ is None else type_.mismatch(value)


def is_record(kind: object) -> bool:
    """Whether `kind` is a class that the codec carries by its fields."""
    if not isinstance(kind, type):
        return False
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or is_pydantic(kind)


def is_pydantic(kind: type) -> bool:
    """Whether `kind` is a pydantic model class; asks pydantic only if somebody has imported it."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def _matches(pattern: tuple[Dim, ...], shape: tuple[int, ...]) -> bool:
    if len(pattern) != len(shape):
        return False
    bound: dict[str, int] = {}
    for want, have in zip(pattern, shape, strict=True):
        if isinstance(want, str):
            want = bound.setdefault(want, have)
        if want is not None and want != have:
            return False
    return True


def _shape_text(shape: tuple[Dim, ...]) -> str:
    inner = ", ".join("_" if d is None else str(d) for d in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


def _is_tensor(value: object) -> bool:
    return isinstance(value, (np.ndarray, TensorRef)) or _torch_tensor(value)


def _dtype(value: object) -> str:
    dtype = typing.cast(Any, value).dtype
    if isinstance(dtype, np.dtype):
        return _DTYPE_NAMES.get(dtype) or str(dtype.name)
    return str(dtype).removeprefix("torch.")


def _shape(value: object) -> tuple[int, ...]:
    return tuple(typing.cast(Any, value).shape)


def _dtype_name(dtype: object) -> str | None:
    if dtype is None:
        return None
    text = str(dtype) if type(dtype).__module__.startswith("torch") else dtype
    if isinstance(text, str):
        text = text.removeprefix("torch.")
        if text in _NOT_NUMPY:
            return text
    try:
        return str(np.dtype(typing.cast(Any, text)).name)
    except TypeError:
        raise DeclarationError("dtype", "the name of a dtype", dtype) from None


_DTYPE_NAMES = {np.dtype(c): np.dtype(c).name for c in "?bhilqBHILQefdFD"}  # dtype.name takes a microsecond
_NOT_NUMPY = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
