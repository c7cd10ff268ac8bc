"""Typed errors of the compute layer. Each names the thing and the mend."""

from __future__ import annotations


class ComputeError(Exception):
    """Base of all errors of the compute layer.

    Args:
        message: what went wrong, with the names and numbers of the case.
        mend: what the caller can do about it.
    """

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(f"{message}; {mend}" if mend else message)
        self.message = message
        self.mend = mend


class KernelMissing(ComputeError):
    """The engine's packages are not installed, or not in the version this build was made for."""


class HookFailed(ComputeError):
    """A take-over of SGLang did not take effect; the message names the target."""


class BadCheckpoint(ComputeError):
    """A checkpoint that does not fit the model: tensors missing, unknown, of wrong shape or dtype."""


class BadRequest(ComputeError):
    """A request that contradicts itself or the model."""


class PromptTooLong(BadRequest):
    """More tokens than the model or the pool can hold; the message has the numbers."""


class EngineFull(ComputeError):
    """The engine refuses the request because its queue is full."""


class ForwardFailed(ComputeError):
    """Python code in a forward pass raised: the model's, or its step hook's; the message names it and says where. The
    requests of that forward end, the engine serves on."""


class SessionClosed(ComputeError):
    """A fixed-row session that was left, and whose rows are gone, was asked for another step."""


class ConversationLost(ComputeError):
    """A role no longer keeps what its session has said: its process was restarted, or other sessions took the room."""


class EngineDied(ComputeError):
    """The engine process ended while requests were running."""


class EngineFailed(ComputeError):
    """The engine process could not start; the message has the end of its error output."""
