"""Whether a field of one type may feed a slot of another: what lint asks before anything runs."""

from __future__ import annotations

from omni_flow.control.types import (
    Anything,
    Audio,
    Dim,
    Image,
    Json,
    ListOf,
    OneOf,
    Record,
    Scalar,
    Tensor,
    Text,
    Tokens,
    Type,
)


def fits(have: Type | None, want: Type | None) -> bool:
    """Whether some value of type `have` is of type `want`. False only if no value can be: lint must not guess."""
    if have is None or want is None or have == want:
        return True
    if isinstance(have, Anything) or isinstance(want, Anything):
        return True
    if isinstance(have, OneOf):
        return any(fits(option, want) for option in have.options)
    if isinstance(want, OneOf):
        return any(fits(have, option) for option in want.options)
    if isinstance(have, Audio) and isinstance(want, Audio):
        return have.rate is None or want.rate is None or have.rate == want.rate
    a, b = _as_tensor(have), _as_tensor(want)
    if a is not None and b is not None:
        same = a.dtype is None or b.dtype is None or a.dtype == b.dtype
        return same and (a.shape is None or b.shape is None or _shapes_meet(a.shape, b.shape))
    if isinstance(have, ListOf) and isinstance(want, ListOf):
        return fits(have.item, want.item)
    if isinstance(have, Scalar) and isinstance(want, Scalar):
        return have.kind is int and want.kind is float
    if isinstance(have, Record) and isinstance(want, Record):
        return issubclass(have.kind, want.kind) or issubclass(want.kind, have.kind)
    return _loosely(have, want) or _loosely(want, have)


def _loosely(a: Type, b: Type) -> bool:
    """Pairs of unlike types that share values, in one direction."""
    if isinstance(a, Json):
        return isinstance(b, (Text, Scalar, ListOf, Tokens))
    if isinstance(a, Tokens):
        whole = isinstance(b, Tensor) and (b.dtype is None or b.dtype.startswith(("int", "uint")))
        return (whole and _rank_may_be(b, 1)) or (isinstance(b, ListOf) and fits(Scalar(int), b.item))
    return False


def _rank_may_be(tensor: Type, rank: int) -> bool:
    return isinstance(tensor, Tensor) and (tensor.shape is None or len(tensor.shape) == rank)


def _as_tensor(type_: Type) -> Tensor | None:
    if isinstance(type_, Tensor):
        return type_
    if isinstance(type_, Image):
        return Tensor("uint8", (None, None, 3))
    return Tensor("float32", (None,)) if isinstance(type_, Audio) else None


def _shapes_meet(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    if len(a) != len(b):
        return False
    return all(x == y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int))
