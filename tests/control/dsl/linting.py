"""What the tests of lint share: a graph with one finding, and what that finding must say."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_flow.control.findings import Finding, GraphError
from omni_flow.control.graph import Graph

from .roles import One

HERE = Path(__file__).parent


def only(graph: Graph) -> Finding:
    """The one finding of a graph, which also compiles exactly if that is a note."""
    findings = graph.lint()
    assert len(findings) == 1, [str(f) for f in findings]
    if findings[0].level == "note":
        assert graph.compile().notes == tuple(findings)
    else:
        with pytest.raises(GraphError) as caught:
            graph.compile()
        assert caught.value.findings == tuple(findings)
    return findings[0]


def says(finding: Finding, code: str, what: str, mend: str) -> None:
    """Its exact words; it names a place in these tests."""
    assert (finding.code, finding.what, finding.mend) == (code, what, mend)
    assert finding.where.startswith(f"{HERE}/")


def declare(method: str, cls: type = One, slots: object = None, outputs: object = ("o",), **options) -> Graph:
    """A placeholder x, one interface on it, all its outputs given to the client."""
    g = Graph("g")
    x = g.placeholder("x", str)
    a = g.role("a", cls).interface(method, [[x]] if slots is None else slots(g, x), list(outputs), **options)
    g.output(**{name: a[name] for name in dir(a)})
    return g
