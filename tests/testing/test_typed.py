from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from omni_flow.control.types import (
    KV,
    Audio,
    Bytes,
    Image,
    Json,
    ListOf,
    OneOf,
    Scalar,
    Tensor,
    Text,
    Tokens,
)
from omni_flow.testing.typed import value_for


@pytest.mark.parametrize(
    "type_",
    [
        Text(), Bytes(), Scalar(int), Scalar(float), Scalar(bool), Tokens(), ListOf(Text()), Json(), Audio(16_000),
        Image(), Tensor(), Tensor("int64", (None, "n", 4)), Tensor("bool", ()), OneOf((Text(), Scalar(int))),
    ],
    ids=str,
)  # fmt: skip
def test_a_drawn_value_is_of_its_type_and_equal_to_itself_drawn_again(type_: Any) -> None:
    for seed in range(20):
        value, again = (value_for(type_, Random(seed)) for _ in range(2))
        assert type_.mismatch(value) is None
        assert value == again
        assert repr(value) == repr(again)


def test_arrays_compare_as_one_value() -> None:
    one, two = value_for(Audio(), Random(1)), value_for(Audio(), Random(2))
    assert (one == two) is False
    assert (one != two) is True
    assert (one == "text") is False
    assert one == np.array(one)
    assert len({one, two, value_for(Audio(), Random(1))}) == 2


def test_a_type_that_cannot_be_drawn_says_so() -> None:
    assert value_for(KV(), Random(0)) is None
    assert value_for(ListOf(KV()), Random(0)) is None
