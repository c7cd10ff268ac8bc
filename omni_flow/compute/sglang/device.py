"""What an engine may use of this machine, from the driver and from the files of what is installed: neither PyTorch nor
SGLang is imported, and CUDA stays untouched in this process."""

from __future__ import annotations

import functools
import importlib.util
import logging
import runpy
from pathlib import Path
from typing import Final

from omni_flow.data import cuda

KERNELS: Final = "sgl_kernel"
log = logging.getLogger("omni_flow.compute")


def device_of_engines() -> str:
    """`cuda` where the driver shows a device and what is installed can compute on one, else `cpu`.

    A device that is left alone for want of packages is logged, once a process.

    Raises:
        SystemRefusal: there is a CUDA driver that gives no answer.
    """
    if not cuda.visible():
        return "cpu"
    lack = _lack()
    if lack:
        _say(f"this machine has a GPU, and {lack}: engines that name no device run on the CPU")
    return "cpu" if lack else "cuda"


def has_flash_attention_3() -> bool:
    """Whether the installed kernels of SGLang have it: not every build does, it is most of their bytes."""
    return any(
        (folder / "flash_attn.py").is_file() and any(folder.glob("flash_ops*.so")) for folder in _folders(KERNELS)
    )


def _lack() -> str:
    """What an engine on a GPU lacks; empty: nothing."""
    versions = [folder / "version.py" for folder in _folders("torch")]
    if not any(path.is_file() and runpy.run_path(str(path)).get("cuda") for path in versions):
        return "PyTorch is not installed, or built without CUDA"
    return "" if _folders(KERNELS) else "SGLang's kernels (sglang-kernel) are not installed"


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


@functools.cache
def _say(line: str) -> None:
    log.warning(line)
