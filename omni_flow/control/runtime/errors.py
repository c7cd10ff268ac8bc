"""What a client of the runtime may have to catch. Each names the thing and the mend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omni_flow.control.facts import Failure
from omni_flow.control.request import Outcome


class RuntimeFault(Exception):
    """Base of the errors of this module."""


class InvalidInput(RuntimeFault, ValueError):
    """A placeholder, its value or a param's value is wrong; nothing was started."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why
        super().__init__(f"input {name!r}: {why}")


class UnknownParameter(RuntimeFault, ValueError):
    """A param that the graph does not declare."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name, self.known = name, tuple(known)
        super().__init__(f"the graph declares no param {name!r}; it declares {', '.join(known) or 'none'}")


class Overloaded(RuntimeFault):
    """The admission limits are reached: try again later (HTTP 429)."""


class NoReplica(RuntimeFault):
    """A role has no live replica right now (HTTP 503)."""

    def __init__(self, role: str) -> None:
        self.role = role
        super().__init__(f"role {role!r} has no live replica; see the deployment's status for the cause")


class RequestFailed(RuntimeFault):
    """A request ended otherwise than done. `partial` holds what was delivered before."""

    def __init__(self, outcome: Outcome, failures: Mapping[str, Failure], partial: Mapping[str, Any]) -> None:
        self.outcome, self.failures, self.partial = outcome, dict(failures), dict(partial)
        causes = "; ".join(sorted({str(f) for f in failures.values()}))
        super().__init__(f"request ended as {outcome}{': ' + causes if causes else ''}")
