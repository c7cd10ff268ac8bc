"""What happens between the choice of a token and the next step: logits and hidden states for those who asked."""

from __future__ import annotations

from typing import Any


def after_sampling(logits_output: Any, batch: Any, tokens: Any, positions: Any) -> Any:
    """Called by the sampler; returns the tokens that the scheduler goes on with."""
    if any(row.logits or row.hidden for row in batch.rows):
        logits, hidden = logits_output.next_token_logits, logits_output.hidden_states
        logits_output.customized_info = {
            "logits": [logits[at].float().cpu() if row.logits else None for at, row in enumerate(batch.rows)],
            "hidden": [hidden[at].float().cpu() if row.hidden else None for at, row in enumerate(batch.rows)],
        }
    return tokens
