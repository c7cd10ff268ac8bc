"""What becomes of an exception in Python code of a forward pass: a typed error, unless the device went with it."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from omni_flow.compute.errors import ForwardFailed


def forward_failed(what: str, error: Exception, device: Any) -> ForwardFailed:
    """The error for the requests of a forward in which `what` raised `error`.

    Raises:
        torch.AcceleratorError: the device can't be used any more; the engine has to end.
    """
    import torch

    torch.get_device_module(device).synchronize()
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno} in {place.name}"
    return ForwardFailed(f"{what} raised {type(error).__name__}: {error} ({where})", "the engine serves on")
