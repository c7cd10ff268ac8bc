"""Arrays in TempBuffers: every type that has a byte form is read back as it was, others are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_flow.data.errors import BadArgument
from omni_flow.data.temp_client import TempClient

from .conftest import TRANSPORTS, Make

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)

MIB = 1 << 20
TEMP = {"pools": (), "temp_bytes": 4 * MIB, "node": "n"}


def test_torch_reads_the_same_bytes(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        buffer = temp.alloc(64)
        buffer.torch((32,), torch.bfloat16)[:] = torch.arange(32)
        seen = temp.adopt(temp.publish(buffer, "bfloat16", (4, 8))).torch()
        assert seen.shape == (4, 8)
        assert seen.dtype == torch.bfloat16
        assert seen.sum().item() == 496.0
        assert np.from_dlpack(seen.view(torch.uint16)).shape == (4, 8)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_tensor_of_a_type_that_numpy_lacks_is_read(manager: Make, name: str) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        values = torch.arange(8).to(getattr(torch, name))
        buffer = temp.alloc(8)
        buffer.torch((8,), values.dtype).copy_(values)
        seen = temp.adopt(temp.publish(buffer, name, (2, 4))).torch()
        assert seen.dtype == values.dtype
        assert seen.float().tolist() == values.float().reshape(2, 4).tolist()


def test_an_array_of_the_other_byte_order_is_read_with_its_values(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        values = np.arange(6, dtype=np.dtype("f4").newbyteorder()).reshape(2, 3)
        assert (temp.adopt(temp.put(values)).numpy() == values).all()


def test_arrays_of_objects_texts_and_records_are_refused(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        for values in (np.array([object()]), np.array(["a"]), np.array([b"a"]), np.zeros(2, [("a", "i4")])):
            with pytest.raises(BadArgument, match="no byte form"):
                temp.put(values)
        lie = temp.publish(temp.alloc(8), "object", (1,))
        with pytest.raises(BadArgument, match="no byte form"):
            temp.adopt(lie).numpy()


def test_an_array_larger_than_its_buffer_is_refused_to_its_reader(manager: Make) -> None:
    server = manager(**TEMP)
    with server.client() as client:
        temp = TempClient(client)
        share = temp.adopt(temp.publish(temp.alloc(4096), "float32", (1025,)))
        with pytest.raises(BadArgument, match="in 4096 bytes"):
            share.numpy()
