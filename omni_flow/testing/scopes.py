"""What follows from a graph alone: the sources in the paths of its fields, slots and interfaces.

The sequential reference's own, from the semantics: it shares nothing with the compiler's.
"""

from __future__ import annotations

from omni_flow.control.spec import GraphSpec, InterfaceSpec, Join, OutputSpec, SlotSpec
from omni_flow.testing.facts import Scope


class Scopes:
    """The scopes of a graph that is free of lint errors.

    `producers` has the interface and output of each field that is no placeholder. Sources that are no streams:
    `heads` has the interface of each loop `H@loop`, `windowing` interface and slot of each window `I@win`.
    """

    def __init__(self, spec: GraphSpec) -> None:
        self._interfaces = {interface.name: interface for interface in spec.interfaces}
        self.placeholders = {placeholder.name: placeholder for placeholder in spec.placeholders}
        self.producers: dict[str, tuple[InterfaceSpec, OutputSpec]] = {
            output.field: (interface, output) for interface in spec.interfaces for output in interface.outputs
        }
        self.heads: dict[str, InterfaceSpec] = {}
        self.windowing: dict[str, tuple[InterfaceSpec, SlotSpec]] = {}
        for interface in spec.interfaces:
            for slot in (slot for group in interface.groups for slot in group):
                if slot.field in spec.feedback:
                    self.heads[f"{interface.name}@loop"] = interface
                if slot.join is Join.WINDOW:
                    self.windowing[f"{interface.name}@win"] = (interface, slot)
        self._feedback = spec.feedback
        self._fields: dict[str, Scope] = {}
        self._of_interfaces: dict[str, Scope] = {}

    def field(self, name: str) -> Scope:
        """The sources in the paths of a field."""
        scope = self._fields.get(name)
        if scope is None:
            if name in self.placeholders:
                scope = (name,) if self.placeholders[name].stream else ()
            else:
                interface, output = self.producers[name]
                scope = self.interface(interface.name) + ((name,) if output.stream else ())
            self._fields[name] = scope
        return scope

    def interface(self, name: str) -> Scope:
        """The sources in the activations of an interface: its longest slot scope, and its loop if it is a head."""
        scope = self._of_interfaces.get(name)
        if scope is None:
            interface = self._interfaces[name]
            slots = [s for group in interface.groups for s in group if s.field not in self._feedback]
            scope = max((self.slot(interface, slot) for slot in slots), key=len)
            if f"{name}@loop" in self.heads:
                scope = (*scope, f"{name}@loop")
            self._of_interfaces[name] = scope
        return scope

    def slot(self, interface: InterfaceSpec | None, slot: SlotSpec) -> Scope:
        """The sources in the paths of what a slot resolves to; no interface: a slot of the client."""
        scope = self.field(slot.field)
        if slot.join is Join.PLAIN:
            return scope
        if slot.join is Join.WINDOW:
            assert interface is not None, "a window is a slot of an interface"
            return (*scope[:-1], f"{interface.name}@win")
        return scope[: self.depth(slot, scope)]

    @staticmethod
    def depth(slot: SlotSpec, scope: Scope) -> int:
        """How many sources of a field's scope a closing join leaves."""
        if slot.over is None:
            return len(scope) - slot.levels
        for index, source in enumerate(scope):
            if source == slot.over or source.endswith(f".{slot.over}"):
                return index
        raise ValueError(f"{slot.field}: no source {slot.over!r} in its scope {scope}")
