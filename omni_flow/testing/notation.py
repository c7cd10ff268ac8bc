"""Graphs as text, in the notation of the documentation, for tests and small experiments.

    p, q*                                       placeholders (* = streamed)
    param n = 2
    A: p -> y*                                  one group of one slot; a stream
    J: [[count(z, 3), optional(p)], [p]] -> o   OR groups of AND slots
    H: [[p], [fb]] -> x | max_iters=3           options: max_iters, race, retries, on_error, role
    feedback fb = x
    out o = collect(z, levels=2)

Slots: `f`, `optional(s)`, `ordered(s)`, `collect(f)`, `last(f)`, `count(f, n)` with n an int, a field, `param.NAME` or
"all", `window(f, size, stride=, left=)`. A slot binds the parameter named after its field, `bind(name, s)` another.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from omni_flow.control.spec import (
    Count,
    FieldRef,
    GraphSpec,
    InterfaceSpec,
    Join,
    OutputSpec,
    ParamRef,
    ParamSpec,
    PlaceholderSpec,
    RoleSpec,
    SlotSpec,
)


class NotationError(ValueError):
    """A line that is not in the notation."""


def parse_graph(text: str, name: str = "graph", replicas: int = 1) -> GraphSpec:
    """The graph that `text` describes. Each interface is the only one of a role of its name unless it says `role=`.

    Raises:
        NotationError: names the line.
    """
    placeholders: list[PlaceholderSpec] = []
    params: list[ParamSpec] = []
    interfaces: list[InterfaceSpec] = []
    feedback: dict[str, str | None] = {}
    outputs: dict[str, SlotSpec] = {}
    for line in (line.strip() for line in text.strip().splitlines()):
        if not line:
            continue
        try:
            word, _, rest = line.partition(" ")
            key, _, value = (part.strip() for part in rest.partition("="))
            if word == "param":
                params.append(ParamSpec(key, ast.literal_eval(value)))
            elif word == "feedback":
                feedback[key] = value
            elif word == "out":
                outputs[key] = _slot(ast.parse(value, mode="eval").body)
            elif ":" in line:
                interfaces.append(_interface(line))
            else:
                names = [part.strip() for part in line.split(",")]
                placeholders += [PlaceholderSpec(n.rstrip("*"), stream=n.endswith("*")) for n in names]
        except (SyntaxError, ValueError, LookupError) as error:
            raise NotationError(f"{line!r}: {error}") from error
    roles = dict.fromkeys(interface.role for interface in interfaces)
    return GraphSpec(
        name=name,
        placeholders=tuple(placeholders),
        params=tuple(params),
        roles=tuple(RoleSpec(role, replicas=replicas) for role in roles),
        interfaces=tuple(interfaces),
        feedback=feedback,
        outputs=outputs,
    )


def _interface(line: str) -> InterfaceSpec:
    name, _, rest = line.partition(":")
    body, _, options = rest.partition("|")
    reads, _, gives = body.partition("->")
    tree = ast.parse(reads.strip(), mode="eval").body
    if not isinstance(tree, ast.List):
        tree = ast.List([ast.List(list(tree.elts) if isinstance(tree, ast.Tuple) else [tree])])
    groups = tuple(tuple(_slot(slot) for slot in group.elts) for group in tree.elts if isinstance(group, ast.List))
    names = [part.strip() for part in gives.split(",") if part.strip()]
    said: dict[str, Any] = {"role": name}
    for option in options.split():
        key, _, value = option.partition("=")
        said[key] = int(value) if value.isdigit() else (value or True)
    return InterfaceSpec(
        name=name,
        method=name,
        groups=groups,
        outputs=tuple(OutputSpec(n.rstrip("*"), n.rstrip("*"), n.endswith("*")) for n in names),
        **said,
    )


def _slot(tree: ast.expr) -> SlotSpec:
    if isinstance(tree, ast.Name):
        return SlotSpec(tree.id, tree.id)
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise NotationError(f"no slot: {ast.unparse(tree)}")
    word = tree.func.id
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords if keyword.arg}
    if word == "bind":
        return replace(_slot(tree.args[1]), param=ast.unparse(tree.args[0]))
    inner = _slot(tree.args[0])
    if word == "optional":
        return replace(inner, optional=True)
    if word == "ordered":
        return replace(inner, ordered=True)
    if word == "count":
        return replace(inner, join=Join.COUNT, n=_count(tree.args[1]), **options)
    if word == "window":
        size = ast.literal_eval(tree.args[1])
        return replace(inner, join=Join.WINDOW, size=size, **({"stride": size} | options))
    return replace(inner, join=Join(word), **options)


def _count(tree: ast.expr) -> Count:
    if isinstance(tree, ast.Name):
        return FieldRef(tree.id)
    if isinstance(tree, ast.Attribute):
        return ParamRef(tree.attr)
    n = ast.literal_eval(tree)
    return "all" if n == "all" else int(n)
