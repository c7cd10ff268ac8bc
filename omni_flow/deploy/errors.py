"""What launching a deployment raises. Each error names the thing and the mend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class DeployError(Exception):
    """Base of everything here."""


class LaunchError(DeployError):
    """A deployment could not be brought up; nothing of it is left running.

    `causes` says it by role (`""` for what concerns no single role). `traces` holds tracebacks by role; `debug` puts
    them into the message.
    """

    def __init__(self, causes: Mapping[str, str], traces: Mapping[str, str] | None = None, *, debug: bool = False):
        self.causes = dict(causes)
        self.traces = dict(traces or {})
        lines = [f"role {role!r}: {cause}" if role else cause for role, cause in self.causes.items()]
        if debug:
            lines += [trace for trace in self.traces.values() if trace]
        super().__init__("\n".join(lines))


class UnknownRole(DeployError, LookupError):
    """A role that the graph does not have."""

    def __init__(self, role: str, known: Sequence[str]) -> None:
        self.role = role
        super().__init__(f"the graph has no role {role!r}; it has {', '.join(known) or 'none'}")


class RunDirInUse(DeployError):
    """Another deployment that lives has this run directory."""

    def __init__(self, path: str) -> None:
        super().__init__(f"run directory {path} belongs to a deployment that lives; close it or name another directory")
