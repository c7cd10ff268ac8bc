"""What users need to test their own graphs: a simulator, a sequential reference, stand-ins for roles.

Open `simulate.py` first: `simulate(graph)` runs the real control flow on a virtual clock under random schedules and
holds each run against `reference.py`. `world.py` is the simulated surroundings, with `parties.py` and `batching.py`;
`cluster.py` runs several requests side by side, with drains and dying gateways. `schedule.py` says what varies,
`standins.py` and `roles.py` what roles do, `generate.py` draws random graphs, `notation.py` and `vectors.py` read
graphs from text and JSON. `checkpoints.py` writes small random checkpoints in the official layouts.
"""

from omni_flow.testing.checkpoints import tiny_checkpoint
from omni_flow.testing.facts import Activation, Delivered, Given, Result
from omni_flow.testing.reference import interpret
from omni_flow.testing.schedule import Faults
from omni_flow.testing.simulate import Divergence, Report, simulate

__all__ = [
    "Activation",
    "Delivered",
    "Divergence",
    "Faults",
    "Given",
    "Report",
    "Result",
    "interpret",
    "simulate",
    "tiny_checkpoint",
]
