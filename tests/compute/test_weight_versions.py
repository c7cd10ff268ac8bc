"""The version of shared weights that an engine computes with is the one in the keys of its pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from omni_flow.compute.sglang.shared_weights import SharedWeights
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import UnknownName
from omni_flow.data.identity import Namespace
from omni_flow.data.launch import start
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.names import Family


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "memory.sock")
    process = start(ServerConfig(path=path, huge=False))
    yield path
    process.terminate()
    assert process.wait(20) == 0


def namespace(version: int) -> Namespace:
    return Namespace(
        model="m", revision="r", weight_version=version, dtype="float32", page_size=16, attention_layout="mla"
    )


def weights(path: str, version: int) -> tuple[MemoryManagerClient, SharedWeights, float]:
    """An engine's weights, each the number of the version its loader was to load; its client, and one of them."""

    def load() -> nn.Module:
        layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
        layer.weight.fill_(version)
        return layer

    def empty() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(8, 8, bias=False)

    client = MemoryManagerClient(path, name="engine")
    shared = SharedWeights(client, namespace(version), ["test"], -1)
    model = shared.load(load, empty)
    value = next(iter(model.parameters()))[3, 3].item()
    return client, shared, value


def test_engines_map_the_weights_that_their_page_keys_name_before_and_after_a_switch(manager: str) -> None:
    old, shared, value = weights(manager, 0)
    assert (shared.loaded_here, value) == (True, 0.0)
    new, shared, value = weights(manager, 1)
    assert (shared.loaded_here, value) == (True, 1.0)
    with MemoryManagerClient(manager) as operator:
        WeightClient(operator).switch(Family("m", "r"), 1)
    late, shared, value = weights(manager, 1)
    assert (shared.loaded_here, value) == (False, 1.0)
    with pytest.raises(UnknownName, match="version 1 is current"):
        weights(manager, 0)
    assert namespace(0).root() != namespace(1).root()
    for client in (old, new, late):
        client.close()
