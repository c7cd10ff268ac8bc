"""What the runtime knows of an interface's method: how to call it and what its outputs are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omni_flow.control.compile import DONE
from omni_flow.control.host import RoleError
from omni_flow.control.plan import Interface, Plan
from omni_flow.control.runtime.values import Inputs, Values, input_types, may_spill, output_type
from omni_flow.control.spec import BatchSpec
from omni_flow.control.types import Type


class Emit:
    """What a generator with several outputs yields: `emit(name=value, ...)`."""

    __slots__ = ("values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values


def emit(**values: Any) -> Emit:
    """Give outputs by name from a generator: a frame of each stream named, the value of each single output named."""
    return Emit(values)


@dataclass(frozen=True, slots=True)
class OutputPort:
    """One output of a method: its index in the plan, name, the field's name and its type if declared.

    `spills`: its large arrays may lie in the data plane (no reader's messages are kept to be said again).
    """

    index: int
    name: str
    field: str
    type: Type | None
    stream: bool
    spills: bool


class Method:
    """One interface's method on a role instance.

    `asynchronous`: it runs on the loop. `streams`: it yields. `frames`: it yields frames of the one stream directly.
    """

    __slots__ = (
        "asynchronous",
        "batch",
        "call",
        "frames",
        "inputs",
        "interface",
        "names",
        "ports",
        "streams",
        "takes_ctx",
    )

    def __init__(self, plan: Plan, interface: Interface, instance: object, values: Values) -> None:
        spec = interface.spec
        self.interface = interface
        self.call: Callable[..., Any] = getattr(instance, spec.method)
        self.inputs = Inputs(plan, interface, values, input_types(plan, interface))
        self.ports = [
            OutputPort(k, o.name, o.field, output_type(o), o.stream, may_spill(plan, o.field))
            for k, o in enumerate(spec.outputs)
            if o.name != DONE
        ]
        self.names = {port.name: port for port in self.ports}
        streamed = any(port.stream for port in self.ports)
        generates = inspect.isgeneratorfunction(self.call) or inspect.isasyncgenfunction(self.call)
        self.streams = streamed or generates
        self.frames = streamed and len(self.ports) == 1
        self.asynchronous = inspect.iscoroutinefunction(self.call) or inspect.isasyncgenfunction(self.call)
        self.batch: BatchSpec | None = spec.batch
        self.takes_ctx = next(iter(inspect.signature(self.call).parameters), None) == "ctx"

    def returned(self, result: Any) -> list[tuple[OutputPort, Any]]:
        """The outputs in what a method without streams returned.

        Raises:
            RoleError: several outputs and no dict, or a name that is no output.
        """
        if not self.ports:
            return []
        if len(self.ports) == 1:
            return [(self.ports[0], result)]
        if not isinstance(result, Mapping):
            raise RoleError(
                f"{self.interface.name} has outputs {sorted(self.names)} and must return a dict of them, "
                f"not {type(result).__name__}"
            )
        return self._named(result)

    def yielded(self, item: Any) -> list[tuple[OutputPort, Any]]:
        """The outputs in what a generator yielded. Raises RoleError as `returned`."""
        if self.frames and type(item) is not Emit:
            return [(self.ports[0], item)]
        if type(item) is not Emit:
            raise RoleError(
                f"{self.interface.name} has outputs {sorted(self.names)} and must yield emit(name=value), "
                f"not {type(item).__name__}"
            )
        return self._named(item.values)

    def _named(self, values: Mapping[str, Any]) -> list[tuple[OutputPort, Any]]:
        found = []
        for name, value in values.items():
            port = self.names.get(name)
            if port is None:
                raise RoleError(f"{self.interface.name} gave {name!r}; its outputs are {sorted(self.names)}")
            found.append((port, value))
        return found
