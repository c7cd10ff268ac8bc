"""Which package serves which checkpoint, by `model_type` of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from omni_flow.compute.prefix import MatchRule, anywhere
from omni_flow.models.deepseek_v2.layout import DeepseekV2Config


class Family(NamedTuple):
    """What the engine must know of a model.

    Args:
        tensors: config → every tensor of a checkpoint with its shape; None: not checked.
        rule: where a cached prefix may end.
    """

    tensors: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]] | None = None
    rule: MatchRule = anywhere


_FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(lambda config: DeepseekV2Config.read(config).tensors()),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; models without a package are plain causal ones."""
    return _FAMILIES.get(str(config.get("model_type")), Family())
