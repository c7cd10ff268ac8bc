"""Payloads to bytes and back."""

from __future__ import annotations

import contextlib
import datetime
import enum
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omni_flow.control.codec import ONE_ARRAY, SPILL_BYTES, Codec, MalformedPayload, NotSerialisable, decode, encode
from omni_flow.control.types import KV, Audio, Bytes, Image, ListOf, OneOf, Record, Scalar, Tensor, Text
from omni_flow.refs import ABSENT, KVRef, TensorRef

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
NUMBERS = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="=")
    | hnp.floating_dtypes(endianness="=")
    | (hnp.complex_number_dtypes(endianness="=", sizes=(64, 128)))
)
ARRAYS = hnp.arrays(
    NUMBERS.filter(lambda d: d.itemsize <= 16 and d.name not in ("float128", "longdouble")),
    hnp.array_shapes(min_dims=0, min_side=0),
)


class Point(msgspec.Struct):
    x: int
    label: str = ""


class Page(msgspec.Struct):
    pixels: np.ndarray
    at: Point


@dataclass
class Pair:
    left: list[float]
    right: bytes


class Model(pydantic.BaseModel):
    name: str
    when: datetime.date


@given(PLAIN)
def test_plain_values_come_back_equal(value):
    assert decode(encode(value)) == value


@given(ARRAYS)
def test_arrays_come_back_bit_for_bit(array):
    back = decode(encode(array))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


@given(ARRAYS, PLAIN)
def test_arrays_travel_inside_lists_and_dicts(array, value):
    back = decode(encode({"a": [array, value]}))
    assert back["a"][0].tobytes() == array.tobytes()
    assert back["a"][1] == value


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_malformed_bytes_give_the_typed_error_only(data):
    for type_ in (
        None,
        Text(),
        Tensor(),
        Record(Page),
        Record(Model),
        ListOf(Record(Point)),
        OneOf((Text(), Record(Point))),
    ):
        with contextlib.suppress(MalformedPayload):
            decode(data, type_)


@given(st.sampled_from([np.ones((2, 3)), torch.ones(4, dtype=torch.bfloat16), [1, "a"], {"k": b"v"}]), st.data())
@settings(max_examples=300)
def test_damaged_payloads_give_the_typed_error_only(value, data):
    good = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(good[: data.draw(st.integers(0, len(good)))])
    with contextlib.suppress(MalformedPayload):
        decode(cut)


def test_a_decoded_array_is_a_read_only_aligned_view():
    data = encode(np.arange(1000, dtype=np.float64))
    back = decode(data)
    assert not back.flags.writeable
    assert back.flags.aligned
    assert np.shares_memory(back, np.frombuffer(data, np.uint8))


def test_strided_and_big_endian_arrays_are_made_plain():
    a = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    back = decode(encode(a))
    assert back.dtype == np.dtype("int32")
    assert (back == a).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_torch_tensors_come_back_as_torch_tensors(dtype, shape):
    a = torch.arange(6)[: max(1, int(np.prod(shape)))].to(dtype).reshape(-1)[: int(np.prod(shape))].reshape(shape)
    back = decode(encode(a))
    assert (back.dtype, back.shape) == (dtype, a.shape)
    assert torch.equal(back.float(), a.float())


def test_a_tensor_that_needs_a_gradient_travels_without_it():
    back = decode(encode(torch.ones(2, requires_grad=True)))
    assert not back.requires_grad


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (Point(1, "a"), Record(Point)),
        (Pair([0.5], b"x"), Record(Pair)),
        (Model(name="n", when=datetime.date(2020, 1, 2)), Record(Model)),
        ([Point(1), Point(2)], ListOf(Record(Point))),
        ("text", OneOf((Text(), Record(Point)))),
        (Point(3), OneOf((Text(), Record(Point)))),
        (KVRef(b"n" * 32, (b"p" * 32,), 7), KV()),
        ((1, 2), None),
    ],
)
def test_declared_records_are_rebuilt(value, type_):
    back = decode(encode(value, type_), type_)
    assert back == (list(value) if isinstance(value, tuple) else value)


def test_a_record_may_hold_arrays():
    page = Page(np.eye(3, dtype=np.float32), Point(1))
    back = decode(encode(page, Record(Page)), Record(Page))
    assert (back.pixels == page.pixels).all()
    assert back.at == page.at


def test_references_come_back_untyped_too():
    kv = KVRef(b"n" * 32, (), 0)
    assert decode(encode({"kv": kv}))["kv"] == kv


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(np.float32(0.5), 0.5), (np.int8(3), 3), ([np.bool_(True)], [True]), (Colour.RED, "red"), (bytearray(b"a"), b"a")],
)
def test_close_relatives_of_plain_values_become_plain(value, expected):
    back = decode(encode(value))
    assert back == expected
    assert type(back) is type(expected)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "type_", "why"),
    [
        (ABSENT, None, "ABSENT is said by leaving the output out or returning it whole, never inside a value"),
        ([ABSENT], None, "ABSENT is said by leaving the output out or returning it whole, never inside a value"),
        (float("nan"), None, "nan is no finite number; say absent, or put it into an array"),
        ([1.0, float("inf")], None, "inf is no finite number; say absent, or put it into an array"),
        (Pair([float("nan")], b""), Record(Pair), "nan is no finite number; say absent, or put it into an array"),
        (np.float32("nan"), None, "nan is no finite number; say absent, or put it into an array"),
        (2**64, None, "an int beyond 64 bits"),
        ([-(2**63) - 1], None, "an int beyond 64 bits"),
        ("\ud800", None, "a str that is not valid Unicode"),
        (LOOP, None, "it is nested too deeply, or in itself"),
        ({1.5: 2}, None, "the keys of a dict must be str or int"),
        (object(), None, "messages carry text, bytes, numbers, lists, dicts, arrays, tensors and declared records"),
        ({1, 2}, None, "messages carry text, bytes, numbers, lists, dicts, arrays, tensors and declared records"),
        (np.array(["a"]), None, "an array of <U1 is not one of numbers"),
        (np.array([object()]), None, "an array of object is not one of numbers"),
        (
            Point(1),
            None,
            "the field does not say so; annotate what makes it with Point, so that readers can rebuild it",
        ),
        (
            torch.sparse_coo_tensor(
                torch.zeros((1, 0), dtype=torch.long), torch.zeros(0), (3,), check_invariants=False
            ),
            None,
            "a torch tensor of layout torch.sparse_coo on cpu has no plain bytes",
        ),
    ],
)
def test_what_has_no_faithful_form_is_refused_by_name(value, type_, why):
    with pytest.raises(NotSerialisable) as caught:
        encode(value, type_, interface="llm.chat", field="token")
    assert caught.value.why == why
    assert str(caught.value).startswith("'token' of 'llm.chat': a value of type ")
    assert (caught.value.interface, caught.value.field) == ("llm.chat", "token")


@pytest.mark.parametrize(
    ("value", "type_", "text"),
    [
        (1, Text(), "no payload of type Text: expected Text, got int 1"),
        ("a", Bytes(), "no payload of type Bytes: expected Bytes, got str"),
        ({"x": "no"}, Record(Point), "no payload: Expected `int`, got `str` - at `$.x`"),
        (
            np.zeros((2, 2)),
            Image(),
            "no payload of type Image: expected Image, got numpy float64 array of shape (2, 2)",
        ),
        ("a", Scalar(int), "no payload of type int: expected int, got str"),
        (
            np.zeros(3),
            Audio(16_000),
            "no payload of type Audio(16000): expected Audio(16000), got numpy float64 array of shape (3,)",
        ),
    ],
)
def test_a_payload_of_another_type_is_malformed(value, type_, text):
    with pytest.raises(MalformedPayload) as caught:
        decode(encode(value), type_)
    assert str(caught.value) == text


def test_bytes_behind_the_value_are_malformed():
    with pytest.raises(MalformedPayload):
        decode(encode(1) + b"\x00")


def test_large_arrays_are_offered_to_the_data_plane_and_fetched_from_it():
    store: list[Any] = []

    def spill(array: Any) -> int:
        store.append(array)
        return len(store) - 1

    asked: list[bool] = []

    def fetch(number: int, torch_tensor: bool) -> Any:
        asked.append(torch_tensor)
        return store[number]

    codec = Codec(spill, fetch)
    big, small, tensor = np.ones(SPILL_BYTES, np.uint16), np.ones(SPILL_BYTES, np.uint8), torch.ones(SPILL_BYTES)
    data = codec.encode([big, small, tensor])
    assert len(data) < 2 * SPILL_BYTES
    back = codec.decode(data)
    assert back[0] is big
    assert (back[1] == small).all()
    assert back[2] is tensor
    assert asked == [False, True]
    store.clear()
    alone = codec.encode(big)
    assert alone == ONE_ARRAY
    assert codec.decode(alone) is big
    with pytest.raises(MalformedPayload):
        decode(alone)


def test_a_reference_given_as_a_value_stays_one():
    ref = TensorRef("node", 0, 4096, 12, 1, "float32", (3,))
    assert decode(encode(ref)) == ref
    assert decode(encode([ref, None])) == [ref, None]
    assert decode(encode(ref), Tensor("float32", (3,))) == ref


def test_a_data_plane_that_declines_leaves_the_array_in_the_message():
    codec = Codec(lambda array: None)
    big = np.ones(SPILL_BYTES, np.uint16)
    assert (decode(codec.encode(big)) == big).all()
