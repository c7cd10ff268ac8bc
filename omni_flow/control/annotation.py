"""From annotations and declarations (str, np.ndarray, a msgspec Struct, `list[str]`, `Audio(16_000)`) to types."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Mapping, Sequence

import numpy as np

from omni_flow.control.types import (
    KV,
    Anything,
    Bytes,
    Json,
    ListOf,
    OneOf,
    Record,
    Scalar,
    Tensor,
    Text,
    Type,
    is_record,
)
from omni_flow.refs import Absent, KVRef, TensorRef


def as_type(annotation: object) -> Type | None:
    """The type an annotation or a declaration means, or None if it means none that is known."""
    if isinstance(annotation, Type):
        return annotation
    if isinstance(annotation, type) and issubclass(annotation, Type):
        # Scalar, ListOf, OneOf and Record need their argument; the others mean their most general form.
        return None if annotation in (Type, Scalar, ListOf, OneOf, Record) else annotation()
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin = typing.get_origin(annotation)
    if origin is None:
        return _class_type(annotation)
    args = typing.get_args(annotation)
    if origin is typing.Annotated:
        stated = [t for t in args[1:] if isinstance(t, Type) or (isinstance(t, type) and issubclass(t, Type))]
        return as_type(stated[0] if stated else args[0])
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is np.ndarray:
        return Tensor()
    if origin in (dict, Mapping):
        return Json()
    if origin in (list, Sequence) or (origin is tuple and len(args) == 2 and args[1] is Ellipsis):
        return ListOf(as_type(args[0]) or Anything())
    if origin in (tuple, typing.Literal):
        return Json()
    return _class_type(origin)


def _class_type(annotation: object) -> Type | None:
    if is_record(annotation):
        return Record(typing.cast(type, annotation))
    if isinstance(annotation, type):
        if issubclass(annotation, np.ndarray):
            return Tensor()
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(annotation, torch.Tensor):
            return Tensor()
        if issubclass(annotation, np.generic):
            return Scalar(int) if issubclass(annotation, np.integer) else Scalar(float)
    return None


def _union(args: tuple[object, ...]) -> Type:
    options = tuple(as_type(a) or Anything() for a in args if a is not Absent)
    if any(isinstance(o, Anything) for o in options) or not options:
        return Anything()
    return options[0] if len(options) == 1 else OneOf(options)


_PLAIN: dict[object, Type] = {
    typing.Any: Anything(),
    object: Anything(),
    str: Text(),
    bytes: Bytes(),
    bytearray: Bytes(),
    memoryview: Bytes(),
    int: Scalar(int),
    float: Scalar(float),
    bool: Scalar(bool),
    None: Scalar(type(None)),
    type(None): Scalar(type(None)),
    list: ListOf(Anything()),
    tuple: ListOf(Anything()),
    dict: Json(),
    KVRef: KV(),
    TensorRef: Tensor(),
}
