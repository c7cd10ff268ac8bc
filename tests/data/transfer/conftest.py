"""Two nodes with arenas and a driver each."""

import pytest
from transfer_nodes import SIZE, SOURCE, TARGET, Memory, Node

from omni_flow.data.transfer.host import DriverHost
from omni_flow.data.transfer.registry import available_drivers
from omni_flow.data.transfer.tcp_parts import TcpOptions


@pytest.fixture(params=available_drivers())
def driver(request):
    return request.param


@pytest.fixture
def memories():
    made = Memory(seed=1), Memory()
    yield made
    for memory in made:
        memory.close()


@pytest.fixture
def nodes(driver, memories):
    """(source, target), the source readable and writable by peers."""
    with DriverHost(driver) as first, DriverHost(driver) as second:
        first.register_arena(SOURCE, memories[0].fd, SIZE, "both")
        second.register_arena(TARGET, memories[1].fd, SIZE, "none")
        yield Node(first, memories[0]), Node(second, memories[1])


@pytest.fixture
def tcp_nodes(memories):
    options = TcpOptions(streams=2, chunk_bytes=64 << 10, attempts=4, stall_s=20.0)
    with DriverHost("tcp", options) as first, DriverHost("tcp", options) as second:
        first.register_arena(SOURCE, memories[0].fd, SIZE, "both")
        second.register_arena(TARGET, memories[1].fd, SIZE, "none")
        yield Node(first, memories[0]), Node(second, memories[1])
