"""Two nodes with arenas and a driver each; nodes of a cluster, each a memory manager and a transfer process."""

import numpy as np
import pytest
from cluster_nodes import ClusterNode, two_met
from transfer_nodes import SIZE, SOURCE, TARGET, Memory, Node

from omni_flow.data.transfer.host import DriverHost
from omni_flow.data.transfer.registry import available_drivers
from omni_flow.data.transfer.tcp_parts import TcpOptions


@pytest.fixture(scope="module", params=available_drivers())
def driver(request):
    return request.param


@pytest.fixture
def memories():
    made = Memory(seed=1), Memory()
    yield made
    for memory in made:
        memory.close()


@pytest.fixture(scope="module")
def kept_nodes(driver):
    """Third-party transports take seconds to load, so tests that kill nothing share a pair."""
    memories = Memory(seed=1), Memory()
    with DriverHost(driver) as first, DriverHost(driver) as second:
        first.register_arena(SOURCE, memories[0].fd, SIZE, "both")
        second.register_arena(TARGET, memories[1].fd, SIZE, "none")
        yield Node(first, memories[0]), Node(second, memories[1])
    for memory in memories:
        memory.close()


@pytest.fixture
def nodes(kept_nodes):
    """(source, target), the source readable and writable by peers, the target all zero."""
    source, target = kept_nodes
    source.memory.bytes[:] = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    target.memory.bytes[:] = 0
    return kept_nodes


@pytest.fixture
def mortal_nodes(driver, memories):
    """As `nodes`, for tests that kill."""
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


@pytest.fixture
def node(tmp_path):
    made = []

    def make(name, *peers, **options):
        made.append(ClusterNode(tmp_path / name, name, tuple(peer.address for peer in peers), **options))
        return made[-1]

    yield make
    for each in made:
        if each.manager.poll() is None:
            assert each.client.check() == []
        each.close()


@pytest.fixture
def mortal_pair(node):
    """Two nodes that have met, for tests that kill."""
    return two_met(node)
