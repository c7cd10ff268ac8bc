"""From what a user names to a graph: a folder with `graph.py`, a file, or `module:attr`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from omni_flow.cli.errors import UserError, did_you_mean
from omni_flow.control.graph import Graph

_INSTALLED = (os.sep + "omni_flow" + os.sep, "importlib", "site-packages")


@dataclass(frozen=True, slots=True)
class Target:
    """A graph and where it is from. `place` is `file.py:attr`, by which another process finds the same graph."""

    text: str
    graph: Graph
    place: str


def load(text: str) -> Target:
    """The graph that `text` names. Raises UserError: no such thing, or the code there raises."""
    module, attr = _module_of(text)
    graph, attr = _graph_of(module, attr, text)
    return Target(text, graph, f"{module.__file__}:{attr}")


def load_object(text: str) -> Any:
    """What `file.py:name` or `module:name` names. Raises UserError."""
    module, attr = _module_of(text)
    if attr is None:
        raise UserError(f"{text} names no class or function", f"write {text}:NAME")
    if not hasattr(module, attr):
        raise UserError(
            f"{text}: the module has no {attr!r}", did_you_mean(attr, [n for n in vars(module) if n[0] != "_"])
        )
    return getattr(module, attr)


def _module_of(text: str) -> tuple[ModuleType, str | None]:
    head, attr = _split(text)
    path = Path(head)
    if path.is_dir():
        path = path / "graph.py"
        if not path.is_file():
            below = sorted(str(p.parent) for p in Path(head).glob("*/graph.py"))
            files = below or sorted(str(p) for p in Path(head).glob("*.py"))
            raise UserError(f"{head} has no graph.py", f"there is {', '.join(files)}" if files else "")
    if path.suffix == ".py" or os.sep in head or path.exists():
        return _import_file(_existing(path, head)), attr
    return _import_module(head), attr


def _split(text: str) -> tuple[str, str | None]:
    head, colon, attr = text.rpartition(":")
    if colon and attr.isidentifier():
        return head, attr
    return text, None


def _existing(path: Path, text: str) -> Path:
    if path.is_file() and path.suffix == ".py":
        return path
    if path.is_file():
        raise UserError(f"{path} is no Python file", "a target is a folder with graph.py, a .py file, or module:attr")
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    entries = [p.name for p in folder.iterdir() if p.is_dir() or p.suffix == ".py"]
    near = did_you_mean(path.name, entries) if entries else ""
    hint = near if near.startswith("did") else "a target is a folder with graph.py, a .py file, or module:attr"
    raise UserError(f"{text}: no such file or folder", hint)


def _import_file(path: Path) -> ModuleType:
    """Import a file: as a part of its package if its folder is one, else by its own name."""
    path = path.resolve()
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if parts[-1] == "__init__":
        parts.pop()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name = ".".join(parts)
    if len(parts) > 1:
        module = _import_module(name)
        if not _lies_at(module.__file__, path):
            raise UserError(
                f"{path}: another module is called {name} ({module.__file__})", "rename the folder, or use module:attr"
            )
        return module
    loaded = sys.modules.get(name)
    if loaded is not None and _lies_at(loaded.__file__, path):
        return loaded
    if loaded is not None or ((found := importlib.util.find_spec(name)) and not _lies_at(found.origin, path)):
        name = f"{name}_{zlib.crc32(str(path).encode()):08x}"  # another module has the name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _raised(error, str(path)) from error
    return module


def _lies_at(file: str | None, path: Path) -> bool:
    return file is not None and Path(file).resolve() == path


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(
            f"{name}: no such file, folder or module", "a target is a folder with graph.py, a .py file, or module:attr"
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            names = [p.stem for p in Path.cwd().iterdir() if p.suffix == ".py" or (p / "graph.py").is_file()]
            near = did_you_mean(name, names)
            hint = near if near.startswith("did") else "a target is a folder with graph.py, a .py file, or module:attr"
            raise UserError(f"{name}: no such file, folder or module", hint) from error
        raise _raised(error, name) from error
    except Exception as error:
        raise _raised(error, name) from error


def _raised(error: Exception, name: str) -> UserError:
    """The user's code raised while it was imported: say where, in their own file."""
    if isinstance(error, SyntaxError):
        return UserError(f"{error.filename}:{error.lineno}: syntax error: {error.msg}")
    place = name
    for frame in traceback.extract_tb(error.__traceback__):
        if not any(part in frame.filename for part in _INSTALLED):
            place = f"{frame.filename}:{frame.lineno}"
    mend = ""
    if isinstance(error, ModuleNotFoundError):
        mend = f"install what provides {error.name!r}; `omni-flow doctor` says what is missing for what"
    return UserError(f"{place}: {type(error).__name__}: {error}", mend)


def _graph_of(module: ModuleType, attr: str | None, text: str) -> tuple[Graph, str]:
    graphs = {name: value for name, value in vars(module).items() if isinstance(value, Graph)}
    if attr is not None:
        if attr in graphs:
            return graphs[attr], attr
        if hasattr(module, attr):
            kind = type(getattr(module, attr)).__name__
            raise UserError(f"{text}: {attr} is a {kind}, not a Graph", did_you_mean(attr, graphs))
        raise UserError(f"{text}: the module has no graph {attr!r}", did_you_mean(attr, graphs))
    if "graph" in graphs:
        return graphs["graph"], "graph"
    distinct = {id(value): name for name, value in graphs.items()}
    if len(distinct) == 1:
        name = next(iter(distinct.values()))
        return graphs[name], name
    if not graphs:
        raise UserError(f"{text}: the module has no Graph", 'declare one: graph = Graph("name")')
    names = ", ".join(f"{text}:{name}" for name in graphs)
    raise UserError(f"{text} has several graphs", f"name one of {names}")
