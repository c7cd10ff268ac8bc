"""Large arrays between roles go through the memory manager by themselves, and arrive as they were."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from omni_flow import Graph, Tensor, launch

from .conftest import deployed
from .tensor_roles import (
    MIB,
    Echo,
    InPlace,
    Keeps,
    Sums,
    Views,
    Where,
    one,
    row,
    temp_of,
    until_counted,
)


def test_a_large_array_lies_in_the_arena_at_its_reader_who_may_not_write_it() -> None:
    with launch(one(Where, "look", Tensor())) as app:
        assert app.submit(x=np.zeros(MIB, np.uint8)).result(20)["y"] == {"shared": True, "writable": False}
        assert app.submit(x=np.zeros(64, np.uint8)).result(20)["y"] == {"shared": False, "writable": False}


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "int64", "float16"])
def test_arrays_come_back_equal_whatever_their_type(dtype: str) -> None:
    array = (np.arange(3 * 5000) % 100).astype(dtype).reshape(3, 5000)
    with launch(one(Echo, "run", Tensor())) as app:
        back = app.submit(x=array).result(20)["y"]
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
        back = app.submit(x=array[:, ::2]).result(20)["y"]
        assert np.array_equal(back, array[:, ::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_arrive_as_tensors(dtype: torch.dtype) -> None:
    with launch(one(Where, "kind", Tensor())) as app:
        seen = app.submit(x=torch.ones((128, 128), dtype=dtype)).result(20)["y"]
        assert seen == f"Tensor {dtype} (128, 128) 16384.0"


@pytest.mark.parametrize("torched", [False, True])
def test_what_is_given_on_as_it_was_received_is_never_copied(torched: bool) -> None:
    async def body() -> None:
        async with deployed(row(3)) as app:
            for turn in range(5):
                array = np.full(MIB // 4, turn, np.float32)
                result = await (await app.submit(x=torch.from_numpy(array) if torched else array)).result()
                assert np.array_equal(np.asarray(result["y"]), array)
                assert [result[f"first{k}"] for k in range(3)] == [turn] * 3
                del result
            await until_counted(app, "temp_published", 0)
            stats = temp_of(app)
            assert stats["temp_forwarded"] == 15
            assert stats["temp_bad_releases"] == stats["temp_bad_forwards"] == 0

    asyncio.run(body())


def test_an_array_kept_from_an_earlier_request_is_given_on_unharmed() -> None:
    async def body() -> None:
        async with deployed(one(Keeps, "run", Tensor())) as app:
            for turn in range(6):
                y = (await (await app.submit(x=np.full(MIB, turn, np.uint8))).result())["y"]
                assert (y == max(0, turn - 1)).all()
                await until_counted(app, "temp_settled", turn + 1)

    asyncio.run(body())


@pytest.mark.parametrize("method", ["head", "view"])
def test_a_part_of_what_was_computed_in_place_keeps_its_bytes(method: str) -> None:
    with launch(one(InPlace, method)) as app:
        for _ in range(3):
            y = app.submit(n=MIB).result(20)["y"]
            assert y.shape == (MIB,)
            assert (y == 7).all()


def test_arrays_of_foreign_byte_order_arrive_with_their_values() -> None:
    array = np.arange(50_000, dtype=">f4")
    with launch(one(Echo, "run", Tensor())) as app:
        assert np.array_equal(app.submit(x=array).result(20)["y"], array)


@pytest.mark.parametrize("method", ["reversed", "foreign"])
def test_arrays_given_on_in_foreign_byte_order_arrive_with_their_values(method: str) -> None:
    array = np.arange(50_000, dtype=np.float32)
    with launch(one(Views, method, Tensor())) as app:
        y = app.submit(x=array).result(20)["y"]
        assert np.array_equal(y, array.view(">f4") if method == "reversed" else array, equal_nan=True)


def test_a_conjugated_tensor_arrives_conjugated() -> None:
    tensor = torch.complex(torch.arange(20_000.0), torch.ones(20_000))
    with launch(one(Views, "conjugate", Tensor())) as app:
        assert torch.equal(app.submit(x=tensor).result(20)["y"], tensor.conj())


def test_roles_use_the_threads_of_torch_after_their_launcher_did() -> None:
    graph = Graph("sums")
    n = graph.placeholder("n", int)
    graph.output(y=graph.role("r", Sums).interface("sum", inputs=[[n]], outputs=["y"]).y)
    assert float((torch.ones(MIB) + 1).sum()) == 2 * MIB
    with launch(graph, start="fork") as app:
        assert app.submit(n=MIB).result(20)["y"] == 2 * MIB
