"""The payload codec: one value of a field to bytes and back, msgpack with extension types. Never pickle.

Text, bytes, numbers, None, lists and dicts travel as msgpack; arrays and tensors as extensions that decode to read-only
views of the message; a Struct, dataclass or pydantic model by its fields, if the field's type names its class. A tuple
comes back as a list. What has no faithful form is refused: ABSENT, NaN and infinity as Python floats (arrays may hold
them), ints beyond 64 bits, arbitrary objects.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import typing
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext

from omni_flow.control import arrays
from omni_flow.control.arrays import ArrayError
from omni_flow.control.types import ListOf, OneOf, Record, Type, describe, is_pydantic, is_record
from omni_flow.refs import ABSENT, KVRef, TensorRef

SPILL_BYTES: Final = 8192
"""Arrays above this many bytes are offered to `spill`."""

Spill = Callable[[Any], int | None]
"""Puts a numpy array or torch tensor elsewhere and says under which number; None: leave it in the message."""
Fetch = Callable[[int, bool], Any]
"""The array of a number; the bool says that it was a torch tensor. Raises `ArrayError` if there is none."""

_NUMPY, _TORCH, _REF, _KV, _NUMPY_SPILLED, _TORCH_SPILLED = 1, 2, 3, 5, 6, 7
_ATOMS: Final = frozenset({str, bytes, bool, int, type(None)})
_FLOATS: Final = frozenset({float})
_KEYS: Final = frozenset({str, int})
_EXT32: Final = struct.Struct(">BIb")
_NUMBER: Final = struct.Struct(">I")
_encode_ref: Final = Encoder().encode
_decode_ref: Final = Decoder(TensorRef).decode

ONE_ARRAY: Final = Encoder().encode(Ext(_NUMPY_SPILLED, _NUMBER.pack(0)))
"""The payload that is one spilled numpy array and nothing else, as it mostly is."""


class NotSerialisable(TypeError):
    """A value that no message can carry. Fails the request it belongs to."""

    def __init__(self, interface: str, field: str, type: str, why: str) -> None:
        self.interface, self.field, self.type, self.why = interface, field, type, why
        place = " of ".join(repr(part) for part in (field, interface) if part)
        super().__init__(f"{place + ': ' if place else ''}a value of type {type} can't be sent: {why}")


class MalformedPayload(ValueError):
    """Bytes that are no payload, or not one of the field's type."""


class _Refused(ValueError):
    """Inside this module: why a value can't be sent."""


class Codec:
    """Encodes and decodes payloads. `spill` and `fetch` are how a data plane takes large arrays out of messages."""

    def __init__(self, spill: Spill | None = None, fetch: Fetch | None = None) -> None:
        self._spill = spill
        self._fetch = fetch
        self._encode = Encoder(enc_hook=self._foreign).encode
        self._decode = Decoder(ext_hook=self._extension).decode
        self._records: dict[type, Callable[[Any], Any]] = {}

    def encode(self, value: object, type_: Type | None = None, *, interface: str = "", field: str = "") -> bytes:
        """The bytes of one value. `interface` and `field` only name it in an error. Raises `NotSerialisable`."""
        kind = type(value)
        try:
            if kind in _ATOMS:
                return self._encode(value)
            if kind is np.ndarray:
                return self._array(value, False)
            if arrays.is_torch(value):
                return self._array(value, True)
            return self._encode(self._checked(value, type_))
        except (_Refused, ArrayError) as wrong:
            raise NotSerialisable(interface, field, describe(value), str(wrong)) from None
        except OverflowError:
            raise NotSerialisable(interface, field, describe(value), "an int beyond 64 bits") from None
        except UnicodeEncodeError:
            raise NotSerialisable(interface, field, describe(value), "a str that is not valid Unicode") from None
        except RecursionError:
            raise NotSerialisable(interface, field, describe(value), "it is nested too deeply, or in itself") from None
        except (TypeError, ValueError) as wrong:
            raise NotSerialisable(interface, field, describe(value), str(wrong)) from wrong

    def decode(self, data: bytes | bytearray | memoryview, type_: Type | None = None) -> Any:
        """The value of some bytes; arrays are read-only views that keep `data` alive. Raises `MalformedPayload`."""
        try:
            if type_ is None:
                return self._decode(data)
            if isinstance(type_, Record) and not is_pydantic(type_.kind):
                return self._record(type_.kind)(data)
            value = _typed(type_, self._decode(data))
        except (msgspec.DecodeError, ArrayError, RecursionError, UnicodeDecodeError, OverflowError) as wrong:
            raise MalformedPayload(f"no payload: {wrong}") from None
        except (TypeError, ValueError) as wrong:
            raise MalformedPayload(f"no payload of type {type_}: {wrong}") from wrong
        text = None if isinstance(value, TensorRef) else type_.mismatch(value)
        if text is not None:
            raise MalformedPayload(f"no payload of type {type_}: {text}")
        return value

    def _record(self, kind: type) -> Callable[[Any], Any]:
        decode = self._records.get(kind)
        if decode is None:
            decode = Decoder(kind, ext_hook=self._extension, dec_hook=_as_declared).decode
            self._records[kind] = decode
        return decode

    def _array(self, value: Any, torch: bool) -> bytes:
        """A whole payload that is one array: header and elements joined in one copy."""
        spilled = self._spilled(value, torch)
        if spilled is not None:
            return self._encode(spilled)
        head, raw = arrays.pack(value, _EXT32.size)
        return b"".join((_EXT32.pack(0xC9, len(head) + len(raw), _TORCH if torch else _NUMPY), head, raw))

    def _spilled(self, value: Any, torch: bool) -> Ext | None:
        if self._spill is None or value.nbytes <= SPILL_BYTES:
            return None
        number = self._spill(value)
        return None if number is None else Ext(_TORCH_SPILLED if torch else _NUMPY_SPILLED, _NUMBER.pack(number))

    def _foreign(self, value: Any) -> Any:
        """What msgspec asks for each value that it doesn't know."""
        torch = arrays.is_torch(value)
        if not torch and not isinstance(value, np.ndarray):
            return _plain(value)
        spilled = self._spilled(value, torch)
        return Ext(_TORCH if torch else _NUMPY, b"".join(arrays.pack(value, 0))) if spilled is None else spilled

    def _extension(self, code: int, data: memoryview) -> Any:
        if code in (_NUMPY, _TORCH):
            return arrays.unpack(data, code == _TORCH)
        if code in (_NUMPY_SPILLED, _TORCH_SPILLED):
            if self._fetch is None or len(data) != _NUMBER.size:
                raise ArrayError("a reference to an array that is not here")
            return self._fetch(_NUMBER.unpack(data)[0], code == _TORCH_SPILLED)
        if code == _REF:
            return _decode_ref(data)
        if code == _KV:
            return msgspec.msgpack.decode(data, type=KVRef)
        raise ArrayError(f"unknown extension {code}")

    def _checked(self, value: Any, type_: Type | None) -> Any:
        """The value with references wrapped; raises `_Refused` for what would not come back as it is."""
        kind = type(value)
        if kind in _ATOMS or kind is np.ndarray:
            return value
        if kind is float:
            if not math.isfinite(value):
                raise _Refused(f"{value} is no finite number; say absent, or put it into an array")
            return value
        if kind is list or kind is tuple:
            return self._checked_items(value, type_.item if isinstance(type_, ListOf) else None)
        if kind is dict:
            if not _KEYS.issuperset(map(type, value)):
                raise _Refused("the keys of a dict must be str or int")
            items = value.values()
            checked = self._checked_items(items, None)
            return value if checked is items else dict(zip(value, checked, strict=True))
        if kind is KVRef:
            return Ext(_KV, msgspec.msgpack.encode(value))
        if kind is TensorRef:
            return Ext(_REF, _encode_ref(value))
        if is_record(kind):
            _need_declared(value, type_)
            return self._checked_record(value)
        return value if arrays.is_torch(value) or isinstance(value, np.ndarray) else _plain(value)

    def _checked_items(self, values: Any, type_: Type | None) -> Any:
        kinds = set(map(type, values))
        if kinds <= _ATOMS or (kinds == _FLOATS and all(map(math.isfinite, values))):
            return values
        return [self._checked(value, type_) for value in values]

    def _checked_record(self, value: Any) -> Any:
        """A Struct or dataclass is left to msgspec once its fields are looked at; a model goes by its dump."""
        if is_pydantic(type(value)):
            return value.model_dump(mode="python")
        names = (
            value.__struct_fields__
            if isinstance(value, msgspec.Struct)
            else [f.name for f in dataclasses.fields(value)]
        )
        for name in names:
            _look_inside(getattr(value, name))
        return value


def _look_inside(value: Any) -> None:
    """Refuses what msgspec would send, but not as it is; types themselves are msgspec's business here."""
    if type(value) is float and not math.isfinite(value):
        raise _Refused(f"{value} is no finite number; say absent, or put it into an array")
    if isinstance(value, (list, tuple)):
        for item in value:
            _look_inside(item)
    elif isinstance(value, dict):
        for item in value.values():
            _look_inside(item)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _look_inside(getattr(value, name))


def _need_declared(value: object, type_: Type | None) -> None:
    options = type_.options if isinstance(type_, OneOf) else (type_,)
    if not any(isinstance(option, Record) and isinstance(value, option.kind) for option in options):
        name = type(value).__name__
        raise _Refused(f"the field does not say so; annotate what makes it with {name}, so that readers can rebuild it")


def _plain(value: Any) -> Any:
    """Scalars of numpy and subclasses of plain types as what they are; anything else is refused."""
    if value is ABSENT:
        raise _Refused("ABSENT is said by leaving the output out or returning it whole, never inside a value")
    if isinstance(value, np.generic):
        if value.dtype.kind not in "biuf":
            raise _Refused(f"a numpy scalar of {value.dtype} has no plain form")
        plain = value.item()
        if isinstance(plain, float) and not math.isfinite(plain):
            raise _Refused(f"{plain} is no finite number; say absent, or put it into an array")
        return plain
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    raise _Refused("messages carry text, bytes, numbers, lists, dicts, arrays, tensors and declared records")


def _typed(type_: Type, value: Any) -> Any:
    """Rebuilds the records that a type names from their fields."""
    if isinstance(type_, Record):
        if is_pydantic(type_.kind):
            return typing.cast(Any, type_.kind).model_validate(value)
        return msgspec.convert(value, type_.kind, dec_hook=_as_declared)
    if isinstance(type_, ListOf) and isinstance(value, list) and _has_record(type_.item):
        return [_typed(type_.item, item) for item in value]
    if isinstance(type_, OneOf) and _has_record(type_):
        for option in type_.options:
            try:
                built = _typed(option, value)
            except (msgspec.ValidationError, ValueError):
                continue  # not of this option
            if option.mismatch(built) is None:
                return built
    return value


def mismatch(type_: Type, value: Any) -> str | None:
    """What a reader that takes `type_` would find wrong with `value` once it has travelled; None: nothing."""
    text = type_.mismatch(value)
    if text is None or not _has_record(type_):
        return text
    try:
        return type_.mismatch(_typed(type_, value))
    except (msgspec.ValidationError, TypeError, ValueError) as wrong:
        return f"expected {type_}: {wrong}"


def _has_record(type_: Type) -> bool:
    if isinstance(type_, OneOf):
        return any(_has_record(option) for option in type_.options)
    return isinstance(type_, Record) or (isinstance(type_, ListOf) and _has_record(type_.item))


def _as_declared(kind: Any, value: Any) -> Any:
    """A field of a record whose type msgspec doesn't know: an array or tensor that the extension has made."""
    wanted = typing.get_origin(kind) or kind
    if isinstance(wanted, type) and isinstance(value, (wanted, TensorRef)):
        return value
    raise ValueError(f"expected {kind}, got {describe(value)}")


_DEFAULT: Final = Codec()
encode = _DEFAULT.encode
decode = _DEFAULT.decode
