"""What a share and the shell around it (a replica, or the simulator) say to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from omni_flow.control.buckets import Node, inputs
from omni_flow.control.facts import Message
from omni_flow.control.plan import Interface, InterfaceId, Path

if TYPE_CHECKING:
    from omni_flow.control.activations import Activations


class RoleError(Exception):
    """Role code broke a rule of its outputs: gave one twice, one that doesn't exist, or a frame after the end."""


class Host(Protocol):
    """What a share needs from the shell around it (a replica, or the simulator)."""

    def send(self, role: int, share: int, message: Message, interfaces: tuple[InterfaceId, ...]) -> None:
        """Send to a share of `role`, perhaps this one. `interfaces` are those that read it there."""

    def to_gateway(self, message: Message) -> None:
        """Send to the request's gateway."""

    def start(self, share: Activations, activation: Activation) -> None:
        """Run `activation`: call the role's method with its inputs, later."""

    def resume(self, share: Activations, activation: Activation) -> None:
        """Credit came back: a stream of `activation` that had to wait may go on."""

    def decode(self, payload: Any) -> Any:
        """The value in a payload (joins look at values: a count's n, the frames a window policy cuts)."""

    def report(self, share: Activations, interface: Interface, path: Path, error: Exception) -> None:
        """A window policy raised `error`; its windows end torn."""


class Activation:
    """One execution of an interface. `inputs` is by parameter; `given[k]` counts what output k has said."""

    __slots__ = ("closed", "context", "given", "group", "inputs", "interface", "node")

    def __init__(self, interface: Interface, node: Node, group: int) -> None:
        self.interface = interface
        self.node = node
        self.group = group
        self.inputs: dict[str, Any] = inputs(interface.groups[group], node)
        self.given = [0] * len(interface.outputs)
        self.closed = False
        self.context: Any = None

    @property
    def path(self) -> Path:
        return self.node.path

    @property
    def iteration(self) -> int:
        """The number of the innermost loop iteration, for a head's activation."""
        return self.node.number

    @property
    def last_iteration(self) -> bool:
        """Whether `max_iters` ends the loop with this iteration of a head."""
        return self.interface.loop is not None and self.node.number + 1 == self.interface.max_iters
