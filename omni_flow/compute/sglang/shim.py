"""What must happen before `import sglang` where there is no GPU: stand-ins for packages that only exist with CUDA.

SGLang imports triton, torchvision and (for names only) a few of their symbols at module level. On a CPU none of them is
ever called: attention, sampling and experts run in plain PyTorch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.metadata import entry_points
from pathlib import Path

from omni_flow.compute.errors import KernelMissing

PLATFORM = "omni_flow_cpu"


class _Name:
    """A name of a package that is not installed: can be imported, compared and looked into, raises when called."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._where}.{name}")

    def __call__(self, *_: object, **__: object) -> object:
        raise KernelMissing(f"{self._where} is not installed", "this call needs the GPU packages of SGLang")


class _Absent(types.ModuleType):
    """A module that is not installed, with every name in it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.28.0"
        self.__spec__ = importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


class _Loader(Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    """Finds any module of one package that is not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)


def _stub_triton() -> None:
    """Use SGLang's own stand-in for triton, made for other machines without it."""
    if importlib.util.find_spec("triton") is not None:
        return
    # inductor must have found out that there is no triton before something of that name appears
    import torch._inductor.runtime.triton_compat  # noqa: F401

    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "_triton_stub.py"
    spec = importlib.util.spec_from_file_location("sglang._triton_stub", path)
    if spec is None or spec.loader is None:
        raise KernelMissing(f"{path} can't be loaded", "install sglang==0.5.17")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()


def _stub_torchvision() -> None:
    """PyPI's torchvision is linked against CUDA. transformers wants one before image processors can be named."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder("torchvision"))


def prepare_cpu() -> None:
    """Make `import sglang` work with a CPU build of PyTorch and select the platform of this package.

    Call it once, before anything imports sglang.

    Raises:
        KernelMissing: sglang is not installed.
    """
    if importlib.util.find_spec("sglang") is None:
        install = "pip install -r requirements/sglang-cpu.txt, then --no-deps -r requirements/sglang-nodeps.txt"
        if sys.version_info >= (3, 13):
            install = "it needs Python 3.11 or 3.12: make PYTHON=python3.11 distclean setup"
        raise KernelMissing("sglang is not installed", install)
    if PLATFORM not in entry_points(group="sglang.srt.platforms").names:
        raise KernelMissing(
            f"omni-flow is installed without its entry point {PLATFORM}",
            "install it again (pip install -e .), and remove an old omni_flow.egg-info",
        )
    os.environ["SGLANG_PLATFORM"] = PLATFORM
    _stub_triton()
    _stub_torchvision()
