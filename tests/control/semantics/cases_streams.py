"""Cases of joins, nested streams, broadcasts, windows, ordered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from derived import Cases, Q, same, spread, tell
from holding import FAILED, raising

case = Cases()

# ---- joins that close a stream -------------------------------------------------------------------------------

CLOSING = """
    p, q
    A: p -> y*
    B: y -> z
    C: [[collect(z)], [q]] -> c
    D: [[count(z, 2)], [q]] -> d
    L: [[last(z)], [q]] -> l
    out c = c
    out d = d
    out l = l
"""
for name, given, expected, outcome in [
    ("no frames", {"p": [], "q": 0}, ([Q], [Q], [Q]), "done"),
    ("a stream that never starts", {"q": 0}, ([Q], [Q], [Q]), "done"),
    ("frames that are all absent", {"p": [None, None], "q": 0}, ([Q], [Q], [Q]), "done"),
    ("one frame", {"p": [None, 1], "q": 0}, ([{"z": [1]}], [Q], [{"z": 1}]), "done"),
    (
        "absent ones between",
        {"p": [None, 1, None, 2, 3, None], "q": 0},
        ([{"z": [1, 2, 3]}], [{"z": [1, 2]}], [{"z": 3}]),
        "done",
    ),
    ("a failed frame behind the second", {"p": [1, 2, "!x"], "q": 0}, ([FAILED], [{"z": [1, 2]}], [FAILED]), "failed"),
    ("a failed frame before the second", {"p": [1, "!x", 2], "q": 0}, ([FAILED], [FAILED], [FAILED]), "failed"),
    ("torn behind the second", {"p": [1, 2, "!"], "q": 0}, ([FAILED], [{"z": [1, 2]}], [FAILED]), "failed"),
    ("torn before the second", {"p": [None, 1, "!"], "q": 0}, ([FAILED], [FAILED], [FAILED]), "failed"),
    ("torn at once", {"p": ["!"], "q": 0}, ([FAILED], [FAILED], [FAILED]), "failed"),
]:
    roles = {"A": spread("y"), "B": same("z"), "C": tell("c"), "D": tell("d"), "L": tell("l")}
    outs = dict(zip("cdl", expected, strict=True))
    case(f"joins over {name}", CLOSING, given, outs, outcome=outcome, **roles)

COUNT = "p, m, q\nA: p -> y*\nM: m -> n\nC: [[count(y, n)], [q]] -> c\nout c = c"
for name, m, stream, expected, outcome in [
    ("as many as come", 3, [1, 2, 3], [{"y": [1, 2, 3]}], "done"),
    ("more than come", 4, [1, 2, 3], [Q], "done"),
    ("none of a torn stream", 0, [1, "!"], [Q], "done"),
    ("less than none", -1, [1], [Q], "done"),
    ("an absent number", None, [1, "!"], [Q], "done"),
    ("a failed number", "!", [1], [FAILED], "failed"),
    ("a text", "two", [1, 2], [FAILED], "failed"),
    ("a fraction", 2.0, [1, 2], [FAILED], "failed"),
    ("the word for all, which is no number", "all", [1, 2], [FAILED], "failed"),
]:
    given = {"p": stream, "m": m, "q": 0} if m is not None else {"p": stream, "q": 0}
    roles = {"A": spread("y"), "M": same("n"), "C": tell("c")}
    case(f"count of {name}", COUNT, given, {"c": expected}, outcome=outcome, **roles)

case(
    "an optional join is left to its default",
    "p, q\nA: p -> y*\nC: optional(collect(y)), optional(bind(z, last(y))), q -> c\nout c = c",
    {"p": [], "q": 0},
    {"c": [Q]},
    A=spread("y"),
    C=tell("c"),
)

# ---- streams in streams --------------------------------------------------------------------------------------

NESTED = """
    p
    A: p -> y*
    B: y -> z*
    C: collect(z) -> c
    out c = c
    out flat = collect(z, levels=2)
    out one = count(z, 1, levels=2)
    out end = last(z, levels=2)
    out cs = collect(c)
"""
for name, given, expected, outcome in [
    ("some empty", [[], [1, 2], [], [3]], ([[1, 2], [3]], [[1, 2, 3]], [[1]], [3], [[[1, 2], [3]]]), "done"),
    ("all empty", [[], []], ([], [], [], [], []), "done"),
    ("no outer frames", [], ([], [], [], [], []), "done"),
    (
        "an inner one torn",
        [[1], [2, "!"], [3]],
        ([[1], FAILED], [FAILED], [[1]], [FAILED], [FAILED]),
        "failed",
    ),
    (
        "an inner one torn at once",
        [["!"], [3]],
        ([FAILED], [FAILED], [FAILED], [FAILED], [FAILED]),
        "failed",
    ),
    ("the outer one torn", [[1], "!"], ([[1], FAILED], [FAILED], [[1]], [FAILED], [FAILED]), "failed"),
]:
    outs = dict(zip(("c", "flat", "one", "end", "cs"), expected, strict=True))
    roles = {"A": spread("y"), "B": spread("z"), "C": same("c")}
    case(f"streams in streams: {name}", NESTED, {"p": given}, outs, outcome=outcome, **roles)

case(
    "three levels, read plainly, close one by one",
    """
    p
    A: p -> x*
    B: x -> y*
    C: y -> z*
    D: z -> d
    E: collect(d) -> e
    F: collect(e) -> f
    G: collect(f) -> g
    out g = g
    out d = d
    """,
    {"p": [[[1, 2], []], [], [[], [3]], [[None]]]},
    {"g": [[[[1, 2]], [[3]]]], "d": [1, 2, 3]},
    A=spread("x"),
    B=spread("y"),
    C=spread("z"),
    D=same("d"),
    E=same("e"),
    F=same("f"),
    G=same("g"),
)
case(
    "n of the outer frame counts the inner ones",
    "p\nA: p -> y*\nN: y -> n\nB: y -> z*\nC: count(z, n) -> c\nout c = c",
    {"p": [[1, 5, 6], [3, 5, 6], [2, 7, 8]]},
    {"c": [[1], [3, 5, 6], [2, 7]]},
    A=spread("y"),
    N=lambda y: [("n", y[0])],
    B=spread("z"),
    C=same("c"),
)

# ---- broadcasts ----------------------------------------------------------------------------------------------

BROADCAST = """
    p, e, q
    A: p -> y*
    B: y -> z*
    E: e -> v
    J: [[z, y, v], [z, q]] -> j
    out j = j
"""
for name, given, expected, outcome in [
    (
        "two levels deep",
        {"p": [[1], [2, 3]], "e": 9, "q": 0},
        [{"z": 1, "y": [1], "v": 9}, {"z": 2, "y": [2, 3], "v": 9}, {"z": 3, "y": [2, 3], "v": 9}],
        "done",
    ),
    ("absent, with a fallback", {"p": [[1], [2]], "q": 0}, [{"z": 1, "q": 0}, {"z": 2, "q": 0}], "done"),
    ("absent, without", {"p": [[1], [2]]}, [], "done"),
    ("failed", {"p": [[1], [2]], "e": "!", "q": 0}, [FAILED], "failed"),
    ("failed, over no frames", {"p": [[], []], "e": "!", "q": 0}, [], "done"),
    ("failed, over a stream that never starts", {"e": "!", "q": 0}, [], "done"),
]:
    roles = {"A": spread("y"), "B": spread("z"), "E": same("v"), "J": tell("j")}
    case(f"a broadcast {name}", BROADCAST, given, {"j": expected}, outcome=outcome, **roles)

case(
    "a summary of a stream meets each of its frames, also absent ones",
    "p\nA: p -> y*\nB: y -> z\nS: collect(z) -> s\nJ: optional(z), s -> j\nout j = j",
    {"p": [1, None, 2]},
    {"j": [{"z": 1, "s": [1, 2]}, {"s": [1, 2]}, {"z": 2, "s": [1, 2]}]},
    A=spread("y"),
    B=same("z"),
    S=same("s"),
    J=tell("j"),
)
case(
    "one optional frame alone is a dead group where it is absent",
    "p\nA: p -> y*\nB: y -> z\nJ: optional(z) -> j\nout j = j",
    {"p": [1, None, 2]},
    {"j": [{"z": 1}, {"z": 2}]},
    runs={"J": ["y#0", "y#2"]},
    A=spread("y"),
    B=same("z"),
    J=tell("j"),
)

# ---- windows -------------------------------------------------------------------------------------------------


def windows(size: int, stride: int, left: int) -> str:
    return f"""
        p
        A: p -> y*
        B: y -> z
        W: window(z, {size}, stride={stride}, left={left}) -> w
        out w = w
        out all = collect(w)
        out two = count(w, 2)
        out last = last(w)
    """


for name, (size, stride, left), given, ws, torn in [
    ("none", (3, 3, 1), [], [], False),
    ("only absent ones", (3, 3, 1), [None, None], [], False),
    ("fewer than the size", (4, 2, 2), [1], [[1]], False),
    ("fewer than the stride", (2, 5, 0), [1, 2, 3], [[1, 2]], False),
    ("a gap of the stride reached", (2, 5, 0), [1, 2, 3, 4, 5, 6], [[1, 2], [6]], False),
    ("a gap and left context", (2, 5, 2), [1, 2, 3, 4, 5, 6], [[1, 2], [4, 5, 6]], False),
    ("overlap, the tail covered", (4, 2, 0), [1, 2, 3, 4], [[1, 2, 3, 4]], False),
    ("overlap, the tail new", (4, 2, 1), [1, 2, 3, 4, 5], [[1, 2, 3, 4], [2, 3, 4, 5]], False),
    ("overlap by one", (3, 1, 0), [1, 2, 3, 4], [[1, 2, 3], [2, 3, 4]], False),
    ("much left context", (2, 2, 3), [1, 2, 3, 4, 5], [[1, 2], [1, 2, 3, 4], [2, 3, 4, 5]], False),
    ("absent ones between", (2, 2, 1), [None, 1, None, 2, 3, None], [[1, 2], [2, 3]], False),
    ("torn, the tail dropped", (2, 2, 0), [1, 2, 3, 4, 5, "!"], [[1, 2], [3, 4]], True),
    ("torn before the first is full", (3, 3, 0), [1, 2, "!"], [], True),
    ("torn where a window just ended", (2, 2, 0), [1, 2, "!"], [[1, 2]], True),
    ("a failed frame tears", (2, 2, 0), [1, 2, 3, "!x", 5, 6], [[1, 2]], True),
]:
    case(
        f"windows of {name}",
        windows(size, stride, left),
        {"p": given},
        {
            "w": [*ws, FAILED] if torn else ws,
            "all": [FAILED] if torn else ([ws] if ws else []),
            "two": [ws[:2]] if len(ws) >= 2 else ([FAILED] if torn else []),
            "last": [FAILED] if torn else ws[-1:],
        },
        outcome="failed" if torn else "done",
        A=spread("y"),
        B=same("z"),
        W=same("w"),
    )

case(
    "windows of a stream that on_error=absent cut short flush their tail",
    "p\nA: p -> y* | on_error=absent\nW: window(y, 2) -> w\nout w = w",
    {"p": [1, 2, 3, "!"]},
    {"w": [[1, 2], [3]]},
    A=spread("y"),
    W=same("w"),
)
case(
    "windows of inner streams are cut under each outer frame",
    "p\nA: p -> y*\nB: y -> z*\nW: window(z, 2, stride=1, left=1), y -> w\nC: collect(w) -> c\nout c = c",
    {"p": [[1, 2, 3], [], [4]]},
    {"c": [[[1, 2], [1, 2, 3]], [[4]]]},
    A=spread("y"),
    B=spread("z"),
    W=lambda z, y: [("w", z)],
    C=same("c"),
)
case(
    "a window whose broadcast is absent does not run, and all of them are absent",
    "p, q\nA: p -> y*\nW: window(y, 2), q -> w\nC: [[collect(w)], [p]] -> c\nout c = c",
    {"p": [1, 2, 3]},
    {"c": [{"p": [1, 2, 3]}]},
    runs={"W": []},
    A=spread("y"),
    W=same("w"),
    C=tell("c"),
)
case(
    "a window that raises under on_error=absent is passed over",
    "p\nA: p -> y*\nW: window(y, 2) -> w, s* | on_error=absent\nout w = collect(w)\nout s = collect(s, levels=2)",
    {"p": [1, 2, 3, 4, 5]},
    {"w": [[[1, 2], [5]]], "s": [[1, 3, 5]]},
    A=spread("y"),
    W=lambda y: raising(("s", y[0])) if y == [3, 4] else [("w", y), ("s", y[0])],
)
case(
    "windows of windows",
    "p\nA: p -> y*\nV: window(y, 2) -> v\nW: window(v, 2, stride=1) -> w\nout w = w",
    {"p": [1, 2, 3, 4, 5]},
    {"w": [[[1, 2], [3, 4]], [[3, 4], [5]]]},
    A=spread("y"),
    V=same("v"),
    W=same("w"),
)

# ---- ordered -------------------------------------------------------------------------------------------------

ORDERED = "p, q\nA: p -> y*\nB: y -> z\nO: ordered(z) -> o{}\nK: [[o], [q, y]] -> k\nout o = o\nout k = k"


def first(**inputs: Any) -> Sequence[tuple[str, Any]]:
    return [("k", inputs.get("o", "q"))]


for name, given, option, os, ks, outcome in [
    ("absent members are passed over", [1, None, 2, None], "", [1, 2], [1, "q", 2, "q"], "done"),
    ("all members absent", [None, None], "", [], ["q", "q"], "done"),
    ("no members", [], "", [], [], "done"),
    ("behind a failed member", [1, "!x", 2], "", [1, FAILED], [1, FAILED], "failed"),
    ("behind one that raised", [1, "raise", 2], "", [1, FAILED], [1, FAILED], "failed"),
    ("raised under on_error=absent", [1, "raise", 2], " | on_error=absent", [1, 2], [1, "q", 2], "done"),
    ("a failed member under on_error=absent", [1, "!x", 2], " | on_error=absent", [1, FAILED], [1, FAILED], "failed"),
    ("torn", [1, 2, "!"], "", [1, 2, FAILED], [1, 2, FAILED], "failed"),
]:
    case(
        f"ordered: {name}",
        ORDERED.format(option),
        {"p": given, "q": 0},
        {"o": os, "k": ks},
        outcome=outcome,
        A=spread("y"),
        B=same("z"),
        O=lambda z: raising() if z == "raise" else [("o", z)],
        K=first,
    )
case(
    "ordered under two parents: a failure stays under its own",
    "p\nA: p -> y*\nB: y -> z*\nO: ordered(z) -> o\nC: collect(o) -> c\nout o = o\nout c = count(c, 1)",
    {"p": [[1, 2], [3, "!x", 4]]},
    {"o": [1, 2, 3, FAILED], "c": [[[1, 2]]]},
    outcome="failed",
    A=spread("y"),
    B=spread("z"),
    O=same("o"),
    C=same("c"),
)
case(
    "an ordered member that is dead in its first group runs by the second, in its place",
    "p\nA: p -> y*\nB: y -> z\nO: [[ordered(z), y], [y]] -> o\nout o = o",
    {"p": [1, None, 2]},
    {"o": [{"y": 1, "z": 1}, {"y": None}, {"y": 2, "z": 2}]},
    A=spread("y"),
    B=same("z"),
    O=tell("o"),
)
