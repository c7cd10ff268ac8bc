"""A loader of the weight tests that stops after a step of the protocol: `weight_steps.py SOCKET BYTES STEP`."""

import sys

from weight_role import FAMILY, fill, say, spec

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.weights import messages as m
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.names import content_digest

STEPS = ("connected", "granted", "mapped", "half filled", "filled", "sealed", "released")


def main(path, nbytes, last):
    with MemoryManagerClient(path, name="steps") as client:
        weights = WeightClient(client)

        def step(name):
            if name == last:
                say(step=name)
                sys.stdin.read()

        step("connected")
        grant = client.call(m.W_GET, m.WeightAsk(FAMILY, (spec(nbytes),), None, 0)).body(m.WeightAnswer).grant
        step("granted")
        arena = weights.map(grant.segment, write=True)
        step("mapped")
        fill(arena.view(0, nbytes // 2))
        step("half filled")
        fill(arena.view(0, nbytes))
        step("filled")
        digest = content_digest(arena.view(0, nbytes))
        del arena
        client.call(m.W_SEAL, m.WeightSeal(grant.token, (digest,)))
        step("sealed")
        client.call(m.W_RELEASE, m.WeightRelease((grant.segment,)))
        step("released")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
