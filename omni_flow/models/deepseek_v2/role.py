"""DeepSeek-V2 as a role."""

from __future__ import annotations

from typing import Any

from omni_flow.models.chat import ChatModel
from omni_flow.models.deepseek_v2.template import TEMPLATE


class DeepseekV2(ChatModel):
    """Chat with DeepSeek-V2 or DeepSeek-V2-Lite; see `ChatModel`.

    Args:
        model: folder of the checkpoint.
    """

    def __init__(self, model: str, **more: Any) -> None:
        super().__init__(model, template=TEMPLATE, **more)
