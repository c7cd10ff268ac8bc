"""What a role's method says of itself: parameters, kind of call, and the types in its annotations."""

from __future__ import annotations

import collections.abc
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omni_flow.control.annotation import as_type
from omni_flow.control.spec import OutputSpec
from omni_flow.control.types import ListOf, Type

_ITERATORS = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter that a slot may bind. `type` is None where the annotation says nothing that is known."""

    name: str
    has_default: bool
    type: Type | None = None
    by_keyword: bool = True


@dataclass(frozen=True, slots=True)
class Signature:
    """A method as lint and runtime see it.

    `takes_ctx`: its first parameter is called `ctx`. `open`: it has `**kwargs`, so any name may be bound.
    `generator`: calling it yields (a generator, an async generator, or annotated as an iterator). `result` is the type
    of what it returns, or of what it yields; `results` the types by output name where it returns a TypedDict.
    `unresolved` names annotations that could not be evaluated (names imported for type checking only).
    """

    parameters: tuple[Parameter, ...]
    takes_ctx: bool = False
    open: bool = False
    generator: bool = False
    asynchronous: bool = False
    result: Type | None = None
    results: Mapping[str, Type] = field(default_factory=dict)
    unresolved: tuple[str, ...] = ()

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of that name, or None."""
        return next((p for p in self.parameters if p.name == name), None)


def role_class(factory: Callable[..., Any] | None) -> type | None:
    """The class whose instances a role's factory makes, or None if that cannot be known without calling it."""
    if isinstance(factory, type):
        return factory
    if factory is None:
        return None
    made = _annotations(factory)[0].get("return")
    return made if isinstance(made, type) else None


def signature_of(cls: type, method: str) -> Signature | None:
    """The signature of a method, or None if the class has no callable of that name.

    A callable that python cannot inspect (some extension types) counts as open: nothing is known against it.
    """
    function = inspect.getattr_static(cls, method, None)
    bound = not isinstance(function, staticmethod)
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    if function is None or not callable(function):
        return None
    try:
        raw = inspect.signature(function)
    except ValueError:
        return Signature((), open=True)
    hints, unresolved = _annotations(function)
    parameters = list(raw.parameters.values())[1 if bound else 0 :]
    takes_ctx = bool(parameters) and parameters[0].name == "ctx"
    named = [p for p in parameters[1 if takes_ctx else 0 :] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    returned = hints.get("return")
    iterates = typing.get_origin(returned) in _ITERATORS or returned in _ITERATORS
    if iterates:
        args = typing.get_args(returned)
        returned = args[0] if args else None
    return Signature(
        parameters=tuple(
            Parameter(p.name, p.default is not p.empty, _type(hints, p.name), p.kind is not p.POSITIONAL_ONLY)
            for p in named
        ),
        takes_ctx=takes_ctx,
        open=any(p.kind is p.VAR_KEYWORD for p in parameters),
        generator=generates or iterates,
        asynchronous=inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function),
        result=None if generates and not iterates else _result(hints, returned, iterates),
        results=_named(returned),
        unresolved=tuple(unresolved),
    )


def _result(hints: Mapping[str, Any], returned: object, iterates: bool) -> Type | None:
    # A missing annotation says nothing; `-> None` says None, which is a value.
    return None if "return" not in hints or (iterates and returned is None) else as_type(returned)


def _named(returned: object) -> dict[str, Type]:
    if not typing.is_typeddict(returned):
        return {}
    hints = typing.get_type_hints(returned, include_extras=True)
    found = {name: as_type(_bare(hint)) for name, hint in hints.items()}
    return {name: type_ for name, type_ in found.items() if type_ is not None}


def _bare(hint: object) -> object:
    origin = typing.get_origin(hint)
    return typing.get_args(hint)[0] if origin in (typing.Required, typing.NotRequired) else hint


def _type(hints: Mapping[str, Any], name: str) -> Type | None:
    return as_type(hints[name]) if name in hints else None


def _annotations(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """Evaluated annotations, each by itself, so that one unknown name does not hide the others."""
    inner = inspect.unwrap(function)
    own = inner.__dict__ if isinstance(inner, types.ModuleType) else getattr(inner, "__annotations__", {})
    names: dict[str, Any] = dict(getattr(inner, "__globals__", {}))
    module = sys.modules.get(getattr(inner, "__module__", ""))
    if module is not None:
        names = {**vars(module), **names}
    found: dict[str, Any] = {}
    unresolved: list[str] = []
    for name, annotation in own.items():
        if not isinstance(annotation, str):
            found[name] = annotation
            continue
        try:
            found[name] = eval(annotation, names)  # the user's own source, as typing.get_type_hints does
        except Exception:
            # Whatever evaluating somebody's annotation raises: it says nothing, and lint notes its name.
            unresolved.append(name)
    return found, unresolved


def element(type_: Type | None) -> Type | None:
    """The type of the items of a list type, or None."""
    return type_.item if isinstance(type_, ListOf) else None


def typed_outputs(
    factory: Callable[..., Any] | None, method: str, full: str, outputs: Sequence[OutputSpec], batched: bool
) -> tuple[OutputSpec, ...]:
    """The outputs of interface `full` with their field names, and types from the method where none is stated."""
    cls = role_class(factory)
    signature = None if cls is None else signature_of(cls, method)
    made = []
    for output in outputs:
        type_ = output.type
        if type_ is None and signature is not None:
            type_ = signature.results.get(output.name)
            if type_ is None and len(outputs) == 1 and output.stream == signature.generator:
                type_ = element(signature.result) if batched else signature.result
        made.append(replace(output, field=f"{full}.{output.name}", type=type_))
    return tuple(made)
