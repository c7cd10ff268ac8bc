"""Cases of OR groups, optional slots, races, role errors, sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from derived import Cases, Q, same, spread, tell
from holding import FAILED, Role, raising

case = Cases()

# ---- absence and failure through groups ----------------------------------------------------------------------

OR_GROUPS = "a, b, c\nJ: [[a, b], [a, c]] -> o\nout o = o"
for given, expected in [
    ({"a": 1, "b": 2, "c": 3}, [{"a": 1, "b": 2}]),
    ({"a": 1, "c": 3}, [{"a": 1, "c": 3}]),
    ({"a": 1}, []),
    ({"b": 2, "c": 3}, []),
    ({}, []),
]:
    case(f"or groups of {''.join(given) or 'nothing'}", OR_GROUPS, given, {"o": expected}, J=tell("o"))

case(
    "absence goes down a chain to the fallback at its end",
    "p, r\nX: p -> x\nY: x -> y\nZ: [[y], [r]] -> z\nout z = z",
    {"r": 5},
    {"z": [{"r": 5}]},
    runs={"X": [], "Y": [], "Z": [""]},
    X=same("x"),
    Y=same("y"),
    Z=tell("z"),
)

OPTIONAL = "a, b, c\nA: a -> x\nJ: [[optional(x), b], [c]] -> o\nout o = o"
for name, given, expected, outcome in [
    ("value", {"a": 1, "b": 2, "c": 3}, [{"x": 1, "b": 2}], "done"),
    ("absent", {"b": 2, "c": 3}, [{"b": 2}], "done"),
    ("a failure, which no default forgives", {"a": "!", "b": 2, "c": 3}, [FAILED], "failed"),
    ("a failure in a group that is dead", {"a": "!", "c": 3}, [{"c": 3}], "done"),
    ("value in a group that is dead", {"a": 1, "c": 3}, [{"c": 3}], "done"),
]:
    case(f"optional: {name}", OPTIONAL, given, {"o": expected}, outcome=outcome, A=same("x"), J=tell("o"))

ALL_OPTIONAL = "a, b, c\nA: a -> x\nJ: [[optional(x), optional(b)], [c]] -> o\nout o = o"
for name, given, expected, outcome in [
    ("none is there", {"c": 3}, [{"c": 3}], "done"),
    ("one is there", {"b": 2, "c": 3}, [{"b": 2}], "done"),
    ("one failed and one is absent", {"a": "!", "c": 3}, [FAILED], "failed"),
]:
    case(f"all optional: {name}", ALL_OPTIONAL, given, {"o": expected}, outcome=outcome, A=same("x"), J=tell("o"))

case(
    "a failed group that comes first decides over a ready one",
    "a, b\nA: a -> x\nJ: [[x], [b]] -> o\nout o = o",
    {"a": "!", "b": 2},
    {"o": [FAILED]},
    outcome="failed",
    runs={"J": []},
    A=same("x"),
    J=tell("o"),
)
case(
    "on_error=absent does not forgive a failed input",
    "a, b\nA: a -> x\nJ: [[x]] -> o | on_error=absent\nK: [[o], [b]] -> k\nout k = k",
    {"a": "!", "b": 2},
    {"k": [FAILED]},
    outcome="failed",
    A=same("x"),
    J=tell("o"),
    K=tell("k"),
)
case(
    "a failure that no output needs is no failure of the request",
    "a, b\nA: a -> x\nB: b -> y\nX: x -> unused\nout y = y",
    {"a": "!", "b": 2},
    {"y": [2]},
    A=same("x"),
    B=same("y"),
    X=same("unused"),
)
case(
    "what was given before on_error=absent stays",
    "a\nA: a -> x, y, s* | on_error=absent\nout x = x\nout y = y\nout s = collect(s)",
    {"a": 1},
    {"x": [1], "y": [], "s": [[7, 8]]},
    A=lambda a: raising(("x", 1), ("s", 7), ("s", 8)),
)

# ---- races ---------------------------------------------------------------------------------------------------

RACE = "a, b\nA: a -> x\nB: b -> y\nJ: [[x], [y]] -> o | race\nout o = o"
for name, given, expected, outcome in [
    ("one absent", {"b": 2}, [{"y": 2}], "done"),
    ("one failed", {"a": "!", "b": 2}, [{"y": 2}], "done"),
    ("one failed and one absent", {"a": "!"}, [FAILED], "failed"),
    ("both failed", {"a": "!", "b": "!"}, [FAILED], "failed"),
    ("both absent", {}, [], "done"),
]:
    roles: dict[str, Role] = {"A": same("x"), "B": same("y"), "J": tell("o")}
    case(f"race: {name}", RACE, given, {"o": expected}, outcome=outcome, **roles)

# ---- role errors ---------------------------------------------------------------------------------------------

ROLE_ERROR = "p, q\nA: p -> x, y, s*{}\nK: [[y], [q]] -> k\nout x = x\nout k = k\nout s = s"
GAVE_TWICE: Callable[..., Any] = lambda p: [("x", 1), ("s", 7), ("x", 2), ("y", 3)]  # noqa: E731
UNKNOWN: Callable[..., Any] = lambda p: [("x", 1), ("s", 7), ("nonsense", 2), ("y", 3)]  # noqa: E731
for name, role in [("an output given twice", GAVE_TWICE), ("an unknown output", UNKNOWN)]:
    case(
        f"{name} fails what is open",
        ROLE_ERROR.format(""),
        {"p": 1, "q": 0},
        {"x": [1], "k": [FAILED], "s": [7, FAILED]},
        outcome="failed",
        A=role,
        K=tell("k"),
    )
    case(
        f"{name} under on_error=absent leaves what is open absent",
        ROLE_ERROR.format(" | on_error=absent"),
        {"p": 1, "q": 0},
        {"x": [1], "k": [Q], "s": [7]},
        A=role,
        K=tell("k"),
    )

# ---- sinks and streamed placeholders -------------------------------------------------------------------------

case(
    "a sink under a stream that fails at one frame fails the request",
    "p\nA: p -> y*\nS: y ->\nB: y -> z\nout z = z",
    {"p": [1, "!x", 2]},
    {"z": ["1", "!x", "2"]},
    outcome="failed",
    A=spread("y"),
    S=lambda y: raising() if y == "!x" else [],
    B=lambda y: [("z", str(y))],
)
case(
    "a sink of a dead group holds nothing up",
    "p, q\nS: q ->\nB: p -> z\nout z = z",
    {"p": 1},
    {"z": [1]},
    runs={"S": []},
    S=lambda q: [],
    B=same("z"),
)
for name, sent, expected in [("nothing", None, [Q]), ("no frames", [], [Q]), ("frames", [1, 2], [{"m": [1, 2]}])]:
    case(
        f"a streamed placeholder that gets {name}",
        "m*, q\nC: [[collect(m)], [q]] -> c\nD: m -> d\nout c = c\nout d = d",
        {"m": sent, "q": 0},
        {"c": expected, "d": sent or []},
        C=tell("c"),
        D=same("d"),
    )
