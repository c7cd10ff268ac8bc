"""Payloads: how the values of a field lie in messages, and how an interface's inputs come out of them.

Between processes a payload is bytes, encoded once at the producer whatever the number of readers; large arrays may lie
in the data plane instead (`tensors.py`). Where all of a graph lives in one process it is a `Local`, the value itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from omni_flow.control.codec import Codec, MalformedPayload, NotSerialisable
from omni_flow.control.facts import Message
from omni_flow.control.plan import Interface, Plan
from omni_flow.control.runtime.tensors import Leased, Placed, Spilled, Tensors
from omni_flow.control.signatures import element, role_class, signature_of
from omni_flow.control.spec import Join, OutputSpec
from omni_flow.control.transport.base import MESSAGE_LIMIT
from omni_flow.control.types import ListOf, Type
from omni_flow.refs import ABSENT, TensorRef

PAYLOAD_LIMIT = MESSAGE_LIMIT - 65_536
"""Most bytes of one payload: what a message carries, less its envelope."""

LISTS = (Join.COLLECT, Join.COUNT, Join.WINDOW)


class Local:
    """A value that stays in its process. Readers must not change it in place."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class WrongValue(TypeError):
    """A value of the wrong type or shape. The message names interface, field, what was expected and what came."""

    def __init__(self, interface: str, field: str, mismatch: str) -> None:
        self.interface, self.field, self.mismatch = interface, field, mismatch
        super().__init__(f"{field!r} of {interface!r}: {mismatch}")


class Values:
    """Encodes and decodes the payloads of one graph.

    `local`: the whole graph is in this process. `tensors`: where large arrays lie; without it they travel in messages.
    """

    def __init__(self, local: bool = False, tensors: Tensors | None = None) -> None:
        self.local = local
        self.tensors = tensors
        self.codec = Codec()
        self._spilling = Codec(spill=self._place)
        self._placed: list[Placed] = []
        self._settling: list[TensorRef] = []

    def encode(self, value: Any, type_: Type | None, interface: str, field: str, spill: bool = True) -> tuple[Any, int]:
        """The payload of a value and its size in bytes; ABSENT stays what it is.

        `spill`: large arrays may be placed in the data plane. On the loop only.

        Raises:
            WrongValue: the value is not of the field's type.
            NotSerialisable: nothing can carry it.
        """
        if value is ABSENT:
            return ABSENT, 0
        if type_ is not None and (mismatch := type_.mismatch(value)) is not None:
            raise WrongValue(interface, field, mismatch)
        if self.local:
            return Local(value), getattr(value, "nbytes", 0)
        if spill and self.tensors is not None:
            try:
                data = self._spilling.encode(value, type_, interface=interface, field=field)
            except NotSerialisable:
                for placed in self._take_placed():
                    placed.discard()
                raise
            if self._placed:
                spilled = Spilled(data, self._take_placed())
                return spilled, spilled.nbytes
        else:
            data = self.codec.encode(value, type_, interface=interface, field=field)
        if len(data) > PAYLOAD_LIMIT:
            raise WrongValue(interface, field, f"{len(data)} bytes, but a message carries {PAYLOAD_LIMIT} at most")
        return data, len(data)

    def _place(self, array: Any) -> int | None:
        assert self.tensors is not None
        placed = self.tensors.place(array)
        if placed is None:
            return None
        self._placed.append(placed)
        return len(self._placed) - 1

    def _take_placed(self) -> list[Placed]:
        placed, self._placed = self._placed, []
        return placed

    def decode(self, payload: Any, type_: Type | None = None) -> Any:
        """The value in a payload. Any thread. Raises MalformedPayload, also when it is not of `type_`."""
        kind = type(payload)
        if kind is bytes:
            return self.codec.decode(payload, type_)
        return payload.value if kind is Local else payload.decode(type_)

    def received(self, message: Message) -> Message:
        """A message of this process to itself, as if it had travelled."""
        value = message.value
        if type(value) is not Spilled:
            return message
        leased = Leased(value.sending(), value.refs, self.tensors)
        return Message(message.kind, message.ref, message.path, message.number, leased)

    def settle(self, spilled: Collection[TensorRef]) -> bool:
        """Arrays placed for a request that is over. True: call `settle_now` in a while, so that many go in one call."""
        first = not self._settling and bool(spilled)
        self._settling += spilled
        return first

    def settle_now(self) -> None:
        """Tell the data plane of all that was settled since the last time."""
        settling, self._settling = self._settling, []
        if settling and self.tensors is not None:
            self.tensors.settle(settling)


class Inputs:
    """How the arguments of one interface's method are made from the cells of its slots."""

    __slots__ = ("_interface", "_lists", "_types", "_values")

    def __init__(self, plan: Plan, interface: Interface, values: Values, types: Mapping[str, Type]) -> None:
        self._interface = interface.name
        self._values = values
        self._types = types
        self._lists = frozenset(
            entry.param for group in interface.groups for entry in group if interface.slots[entry.slot].join in LISTS
        )

    def decode(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name. Raises WrongValue naming the parameter."""
        decode, types, lists = self._values.decode, self._types, self._lists
        found: dict[str, Any] = {}
        for param, cell in cells.items():
            type_ = types.get(param)
            try:
                if param in lists:
                    item = type_.item if isinstance(type_, ListOf) else None
                    found[param] = [decode(c, item) for c in cell]
                else:
                    found[param] = decode(cell, type_)
            except MalformedPayload as wrong:
                raise WrongValue(self._interface, param, str(wrong)) from wrong
        return found


def input_types(plan: Plan, interface: Interface) -> dict[str, Type]:
    """What each parameter takes, by its annotation; parameters without one are not judged.

    A batched method takes lists of what one activation gets.
    """
    role = plan.roles[interface.role].spec
    cls = role_class(role.factory)
    signature = None if cls is None else signature_of(cls, interface.spec.method)
    if signature is None:
        return {}
    found = {p.name: p.type for p in signature.parameters if p.type is not None}
    if interface.spec.batch is not None:
        return {name: item for name, type_ in found.items() if (item := element(type_)) is not None}
    return found


def read_as(plan: Plan) -> dict[str, tuple[Type, ...]]:
    """What the readers of each placeholder take as a value of it, by their annotations; () if one may take any."""
    names = {plan.field_ids[p.name]: p.name for p in plan.spec.placeholders}
    found: dict[str, dict[Type | None, None]] = {name: {} for name in names.values()}
    for output in plan.outputs:
        if output.field in names:
            found[names[output.field]][None] = None
    for interface in plan.interfaces:
        types = input_types(plan, interface)
        entries = [entry for group in interface.groups for entry in group]
        counts = {slot.n_slot for slot in interface.slots} - {None}
        for slot in (s for s in interface.slots if s.field in names):
            params = [entry.param for entry in entries if entry.slot == slot.index]
            for type_ in [*map(types.get, params), *([None] if slot.index in counts else [])]:
                if slot.join in LISTS:
                    type_ = type_.item if isinstance(type_, ListOf) else None
                found[names[slot.field]][type_] = None
    return {name: () if None in types else tuple(t for t in types if t is not None) for name, types in found.items()}


def output_type(output: OutputSpec) -> Type | None:
    """The declared type of an output, if it is one that can be checked."""
    return output.type if isinstance(output.type, Type) else None


def may_spill(plan: Plan, field: str) -> bool:
    """Whether large arrays of a field may lie in the data plane. What is kept to be said again must not: it would hold
    memory that its readers have long given back."""
    routes = plan.fields[plan.field_ids[field]].routes
    return not any(plan.interfaces[i].spec.retries for route in routes for i in plan.roles[route.role].interfaces)
