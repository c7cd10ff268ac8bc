"""Cases of loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from derived import Cases, same, spread
from holding import FAILED, Role, raising

case = Cases()

# ---- loops ---------------------------------------------------------------------------------------------------


def counting(limit: int) -> Role:
    """Adds one; gives nothing from `limit` on."""

    def run(p: Any = None, fb: Any = None, **rest: Any) -> Sequence[tuple[str, Any]]:
        value = p if fb is None else fb
        return [("x", value), *([("y", value + 1)] if value < limit else [])]

    return run


LOOP = "p\nH: [[p], [fb]] -> x, y | max_iters={}\nfeedback fb = y\nout all = collect(x)\nout x = x\nout end = last(x)"
for name, most, limit, expected in [
    ("ends by itself", 9, 3, [0, 1, 2, 3]),
    ("ends at max_iters", 3, 9, [0, 1, 2]),
    ("runs once", 1, 9, [0]),
    ("ends by itself in its last iteration", 4, 3, [0, 1, 2, 3]),
]:
    outs = {"all": [expected], "x": expected, "end": expected[-1:]}
    case(f"a loop {name}", LOOP.format(most), {"p": 0}, outs, H=counting(limit))
case("a loop whose entry is absent", LOOP.format(3), {}, {"all": [], "x": [], "end": []}, runs={"H": []}, H=counting(9))

case(
    "a dead first iteration goes on if the body needs nothing of it",
    "p, q\nH: [[p], [fb]] -> x | max_iters=3\nB: optional(x), q -> y\nfeedback fb = y\nout x = x\nout y = collect(y)",
    {"q": 0},
    {"x": ["q+", "q++"], "y": [["q", "q+", "q++"]]},
    runs={"H": ["H@loop#1", "H@loop#2"], "B": ["H@loop#0", "H@loop#1", "H@loop#2"]},
    H=lambda p=None, fb=None: [("x", f"{fb}+")],
    B=lambda x=None, q=None: [("y", "q" if x is None else x)],
)
case(
    "a loop whose entry failed has one iteration, and ends torn",
    "p, q\nE: p -> e\nH: [[e], [fb]] -> x | max_iters=3\nfeedback fb = x\nout x = x\nout one = count(x, 1)",
    {"p": "!"},
    {"x": [FAILED], "one": [FAILED]},
    outcome="failed",
    E=same("e"),
    H=counting(9),
)
BODY = """
    p
    H: [[p], [fb]] -> x | max_iters=5
    B: x -> y{}
    feedback fb = y
    out x = x
    out one = count(x, 1)
    out two = count(x, 3)
    out end = last(x)
"""
case(
    "a body that fails tears the loop behind what was",
    BODY.format(""),
    {"p": 0},
    {"x": [0, 1, FAILED], "one": [[0]], "two": [FAILED], "end": [FAILED]},
    outcome="failed",
    H=lambda p=None, fb=None: [("x", p if fb is None else fb)],
    B=lambda x: raising() if x == 1 else [("y", x + 1)],
)
case(
    "a body that fails under on_error=absent ends the loop",
    BODY.format(" | on_error=absent"),
    {"p": 0},
    {"x": [0, 1], "one": [[0]], "two": [], "end": [1]},
    H=lambda p=None, fb=None: [("x", p if fb is None else fb)],
    B=lambda x: raising() if x == 1 else [("y", x + 1)],
)
case(
    "a head that raises fails its iteration, and the loop is torn behind it",
    "p\nH: [[p], [fb]] -> x | max_iters=5\nfeedback fb = x\nout x = x\nout two = count(x, 2)",
    {"p": 0},
    {"x": [0, 1, FAILED], "two": [[0, 1]]},
    outcome="failed",
    H=lambda p=None, fb=None: raising() if fb == 1 else [("x", p if fb is None else fb + 1)],
)
for on_error, values in [("fail", [0, FAILED]), ("absent", [0])]:
    case(
        f"two feedback edges in one group: the loop goes on while both are there, with on_error={on_error}",
        f"""
        p
        H: [[p], [fb, gb]] -> x | max_iters=6
        B: x -> b
        C: x -> c | on_error={on_error}
        feedback fb = b
        feedback gb = c
        out x = x
        """,
        {"p": 0},
        {"x": values},
        outcome="failed" if on_error == "fail" else "done",
        H=lambda p=None, fb=None, gb=None: [("x", p if fb is None else fb + gb)],
        B=lambda x: [("b", x + 1)],
        C=lambda x: raising(),
    )
case(
    "two feedback groups: declared order decides in each iteration, and the loop ends when both are dead",
    """
    p
    H: [[p], [fb], [gb]] -> x | max_iters=9
    B: x -> b
    C: x -> c
    feedback fb = b
    feedback gb = c
    out x = x
    """,
    {"p": 0},
    {"x": [0, "b1", "c2", "b3"]},
    H=lambda p=None, fb=None, gb=None: [("x", p if fb is None and gb is None else (fb or gb))],
    B=lambda x: {0: [("b", "b1")], "c2": [("b", "b3")]}.get(x, []),
    C=lambda x: {0: [("c", "no")], "b1": [("c", "c2")]}.get(x, []),
)
case(
    "an optional feedback beside a needed one",
    "p\nH: [[p], [fb, optional(gb)]] -> x, y, z | max_iters=5\nfeedback fb = y\nfeedback gb = z\nout x = x",
    {"p": 0},
    {"x": [[0, None], [1, None], [2, 20], [3, None]]},
    H=lambda p=None, fb=None, gb=None: [
        ("x", [p if fb is None else fb, gb]),
        *({None: [("y", 1)], 1: [("y", 2), ("z", 20)], 2: [("y", 3)]}.get(fb, [])),
    ],
)
case(
    "a feedback group whose broadcast is absent ends the loop after its first iteration",
    "p, q\nH: [[p], [fb, q]] -> x | max_iters=5\nfeedback fb = x\nout x = x",
    {"p": 0},
    {"x": [0]},
    H=lambda p=None, fb=None, q=None: [("x", 0)],
)
case(
    "a feedback group whose broadcast failed tears the loop after its first iteration",
    "p, q\nQ: q -> r\nH: [[p], [fb, r]] -> x | max_iters=5\nfeedback fb = x\nout x = x\nout one = count(x, 1)",
    {"p": 0, "q": "!"},
    {"x": [0, FAILED], "one": [[0]]},
    outcome="failed",
    Q=same("r"),
    H=lambda p=None, fb=None, r=None: [("x", 0)],
)
case(
    "an absent feedback in a group with a failed broadcast is dead, not failed",
    "p, q\nQ: q -> r\nH: [[p], [fb, r]] -> x, y | max_iters=5\nfeedback fb = y\nout x = x",
    {"p": 0, "q": "!"},
    {"x": [0]},
    Q=same("r"),
    H=lambda p=None, fb=None, r=None: [("x", 0)],
)
case(
    "a loop under each frame, streams in it, and a window over its iterations",
    """
    p
    A: p -> y*
    H: [[y], [fb]] -> x, s* | max_iters=3
    feedback fb = x
    W: window(x, 2) -> w
    C: collect(w) -> c
    out c = c
    out s = collect(s, levels=3)
    out ends = collect(e)
    E: last(x) -> e
    """,
    {"p": [0, 10]},
    {"c": [[[0, 1], [2]], [[10, 11], [12]]], "s": [[0, 1, 1, 2, 2, 10, 11, 11, 12, 12]], "ends": [[2, 12]]},
    A=spread("y"),
    H=lambda y=None, fb=None: [("x", y), ("s", y)] if fb is None else [("x", fb + 1), ("s", fb + 1), ("s", fb + 1)],
    W=same("w"),
    C=same("c"),
    E=same("e"),
)
case(
    "a loop in a loop: the inner one's last value feeds the outer one",
    """
    p
    O: [[p], [ofb]] -> o | max_iters=3
    I: [[o], [ifb]] -> i | max_iters=2
    feedback ifb = i
    L: last(i) -> l
    feedback ofb = l
    out i = i
    out l = collect(l)
    """,
    {"p": 0},
    {"i": [1, 2, 3, 4, 5, 6], "l": [[2, 4, 6]]},
    O=lambda p=None, ofb=None: [("o", p if ofb is None else ofb)],
    I=lambda o=None, ifb=None: [("i", (o if ifb is None else ifb) + 1)],
    L=same("l"),
)
