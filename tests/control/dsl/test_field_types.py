"""What a value must be, what an annotation means, and which types may meet."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic
import pytest
import torch

from omni_flow.control.annotation import as_type
from omni_flow.control.declare import DeclarationError
from omni_flow.control.fits import fits
from omni_flow.control.types import (
    KV,
    Anything,
    Audio,
    Bytes,
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
    check,
)
from omni_flow.refs import ABSENT, Absent, KVRef, TensorRef


class Struct(msgspec.Struct):
    x: int


class Child(Struct):
    y: int = 0


class Model(pydantic.BaseModel):
    x: int


@dataclasses.dataclass
class Data:
    x: int


FLOAT, INT, BOOL = Scalar(float), Scalar(int), Scalar(bool)


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (None, object()),
        (Anything(), object()),
        (Text(), "a"),
        (Bytes(), b"a"),
        (Bytes(), memoryview(b"a")),
        (INT, 3),
        (INT, np.int64(3)),
        (FLOAT, 3),
        (FLOAT, 3.5),
        (BOOL, True),
        (Scalar(type(None)), None),
        (Json(), {"a": [1, None]}),
        (Tokens(), [1, 2]),
        (Tokens(), np.array([1, 2])),
        (Tokens(), torch.tensor([1, 2], dtype=torch.int32)),
        (KV(), KVRef(b"", (), 0)),
        (Image(), np.zeros((2, 3, 3), np.uint8)),
        (Audio(16_000), np.zeros(4, np.float32)),
        (Tensor(), np.zeros(())),
        (Tensor(), torch.zeros(())),
        (Tensor("float32", (None, 3)), np.zeros((7, 3), np.float32)),
        (Tensor(torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (Tensor(np.int8, ("n", 2, "n")), np.zeros((5, 2, 5), np.int8)),
        (Tensor("float32", (4,)), TensorRef("n", 0, 0, 16, 1, "float32", (4,))),
        (ListOf(Text()), ["a", "b"]),
        (OneOf((Text(), INT)), 3),
        (Record(Struct), Child(1)),
        (Record(Model), Model(x=1)),
        (Record(Data), Data(1)),
    ],
)
def test_a_value_of_the_type_has_no_mismatch(type_, value):
    assert check(type_, value) is None


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (Text(), b"a", "expected Text, got bytes"),
        (Text(), None, "expected Text, got NoneType None"),
        (Text(), ABSENT, "expected Text, got ABSENT"),
        (Bytes(), "a", "expected Bytes, got str"),
        (INT, True, "expected int, got bool True"),
        (INT, 1.0, "expected int, got float 1.0"),
        (FLOAT, "1", "expected float, got str"),
        (Json(), b"", "expected Json, got bytes"),
        (Tokens(), ["a"], "expected Tokens, got list"),
        (Tokens(), np.zeros(2), "expected Tokens, got numpy float64 array of shape (2,)"),
        (KV(), "k", "expected KV, got str"),
        (Image(), np.zeros((2, 2), np.uint8), "expected Image, got numpy uint8 array of shape (2, 2)"),
        (Audio(16_000), np.zeros(2), "expected Audio(16000), got numpy float64 array of shape (2,)"),
        (Tensor("float32"), torch.zeros(2).half(), "expected Tensor(float32), got torch float16 tensor of shape (2,)"),
        (
            Tensor("float32", ("n", "n")),
            np.zeros((2, 3), np.float32),
            "expected Tensor(float32, (n, n)), got numpy float32 array of shape (2, 3)",
        ),
        (Tensor(None, (None,)), np.zeros(()), "expected Tensor(any, (_,)), got numpy float64 array of shape ()"),
        (
            Tensor("float32", (3,)),
            TensorRef("n", 0, 0, 16, 1, "float32", (4,)),
            "expected Tensor(float32, (3,)), got float32 tensor of shape (4,)",
        ),
        (ListOf(Text()), ["a", 3], "item 1: expected Text, got int 3"),
        (ListOf(Text()), "a", "expected list[Text], got str"),
        (OneOf((Text(), INT)), 1.5, "expected Text | int, got float 1.5"),
        (Record(Struct), Data(1), "expected Struct, got Data"),
    ],
)
def test_a_mismatch_names_what_was_expected_and_what_came(type_, value, text):
    assert check(type_, value) == text


class Names(typing.TypedDict):
    a: str


@pytest.mark.parametrize(
    ("annotation", "type_"),
    [
        (str, Text()),
        (bytes, Bytes()),
        (bool, BOOL),
        (None, Scalar(type(None))),
        (dict, Json()),
        (dict[str, int], Json()),
        (list, ListOf(Anything())),
        (list[str], ListOf(Text())),
        (Sequence[int], ListOf(INT)),
        (tuple[float, ...], ListOf(FLOAT)),
        (tuple[int, str], Json()),
        (typing.Literal["a"], Json()),
        (np.ndarray, Tensor()),
        (npt.NDArray[np.float32], Tensor()),
        (torch.Tensor, Tensor()),
        (np.float32, FLOAT),
        (Audio, Audio()),
        (Audio(8000), Audio(8000)),
        (typing.Annotated[np.ndarray, Image], Image()),
        (typing.Annotated[np.ndarray, "note", Audio(8000)], Audio(8000)),
        (typing.Annotated[str, "note"], Text()),
        (str | None, OneOf((Text(), Scalar(type(None))))),
        (typing.Optional[str], OneOf((Text(), Scalar(type(None))))),  # noqa: UP045
        (str | Absent, Text()),
        (str | typing.Any, Anything()),
        (typing.Any, Anything()),
        (object, Anything()),
        (KVRef, KV()),
        (TensorRef, Tensor()),
        (Struct, Record(Struct)),
        (Model, Record(Model)),
        (Data, Record(Data)),
        (3, None),
        (ListOf, None),
        (type("Own", (), {}), None),
    ],
)
def test_an_annotation_means_a_type(annotation, type_):
    assert as_type(annotation) == type_


@pytest.mark.parametrize(
    ("have", "want", "may"),
    [
        (Text(), Text(), True),
        (None, Text(), True),
        (Text(), Anything(), True),
        (Text(), Bytes(), False),
        (Text(), Json(), True),
        (INT, FLOAT, True),
        (FLOAT, INT, False),
        (Audio(16_000), Audio(24_000), False),
        (Audio(16_000), Audio(), True),
        (Audio(16_000), Tensor("float32", ("n",)), True),
        (Audio(16_000), Image(), False),
        (Image(), Tensor("uint8"), True),
        (Image(), Tensor("float32"), False),
        (Tensor("float32", (None, 3)), Tensor(None, (2, None)), True),
        (Tensor("float32", (None, 3)), Tensor(None, (2, 4)), False),
        (Tensor("float32", (3,)), Tensor("float32", (3, 1)), False),
        (Tensor(), Tokens(), True),
        (Tensor("float32"), Tokens(), False),
        (ListOf(INT), Tokens(), True),
        (ListOf(Text()), Tokens(), False),
        (ListOf(Text()), ListOf(Text()), True),
        (ListOf(Text()), ListOf(Bytes()), False),
        (Text(), ListOf(Text()), False),
        (Text(), OneOf((Bytes(), Text())), True),
        (OneOf((Bytes(), Text())), INT, False),
        (Record(Child), Record(Struct), True),
        (Record(Struct), Record(Child), True),
        (Record(Struct), Record(Data), False),
        (KV(), Tensor(), False),
    ],
)
def test_types_meet_unless_no_value_can_be_both(have: Type | None, want: Type, may: bool):
    assert fits(have, want) is may


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Audio(0), "rate: expected a sample rate in Hz, got 0"),
        (lambda: Tensor("flaot32"), "dtype: expected the name of a dtype, got 'flaot32'"),
        (lambda: Tensor(None, "n"), "shape: expected a tuple of int, str or None, got 'n'"),
        (lambda: Tensor(None, (1.5,)), "shape: expected a tuple of int, str or None, got (1.5,)"),
    ],
)
def test_a_type_with_a_wrong_argument_is_refused(make, text):
    with pytest.raises(DeclarationError) as caught:
        make()
    assert str(caught.value) == text
