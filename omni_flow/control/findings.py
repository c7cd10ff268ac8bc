"""What lint says: one finding is what is wrong, where it was declared and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` is short and stable (`scope-not-prefix`); `where` is "file:line" of the declaration, or empty."""

    code: str
    what: str
    mend: str
    where: str = ""
    level: Literal["error", "note"] = "error"

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.level} [{self.code}] {self.what}\n    mend: {self.mend}"


class GraphError(ValueError):
    """A graph that cannot work. `findings` holds every error found, not only the first."""

    def __init__(self, graph: str, findings: Sequence[Finding]) -> None:
        self.graph = graph
        self.findings = tuple(findings)
        lines = "\n".join(str(f) for f in self.findings)
        super().__init__(f"graph {graph!r} cannot work:\n{lines}")
