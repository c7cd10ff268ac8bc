"""Which package serves which checkpoint, by `model_type` of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from omni_flow.compute.prefix import MatchRule, anywhere
from omni_flow.models.deepseek_v2.layout import DeepseekV2Config
from omni_flow.models.plain import UNREAD, plain_tensors


class Family(NamedTuple):
    """What the engine must know of a model.

    Args:
        tensors: config → every tensor of a checkpoint with its shape; None: not checked.
        unread: endings of names that a checkpoint may have besides.
        rule: where a cached prefix may end.
    """

    tensors: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]] | None = None
    rule: MatchRule = anywhere
    unread: tuple[str, ...] = ()


_PLAIN = Family(plain_tensors, unread=UNREAD)
_FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(lambda config: DeepseekV2Config.read(config).tensors()),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _PLAIN),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; the tensors of those that are not here are not checked."""
    return _FAMILIES.get(str(config.get("model_type")), Family())
