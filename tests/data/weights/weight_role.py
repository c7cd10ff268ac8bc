"""A role process of the weight tests: gets tensors, says what happened as JSON lines, does what stdin says.

`weight_role.py SOCKET NAME BYTES [hold]`. With `hold` it says "loading" in the loader and goes on when told.
Then: `pss` answers the proportional and resident bytes of its weight mappings, `write` writes into a tensor, end of
stdin ends it.
"""

import ctypes
import json
import sys

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.names import Family, TensorSpec, WeightName

FAMILY = Family("demo/model", "r1")


def spec(nbytes):
    return TensorSpec(WeightName(family=FAMILY, path="layers.0.big", dtype="u8", layer=0), (nbytes,))


def fill(out):
    np.frombuffer(out, np.uint8)[:] = np.resize(np.arange(251, dtype=np.uint8), len(out))


def say(**what):
    print(json.dumps(what), flush=True)


def mapped(field):
    total, ours = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                ours = "omni-weights" in line
            elif ours and line.startswith(field + ":"):
                total += int(line.split()[1]) * 1024
    return total


def main(path, name, nbytes, hold):
    def load(_spec, out):
        if hold:
            say(loading=True)
            sys.stdin.readline()
        fill(out)

    with MemoryManagerClient(path, name=name) as client:
        wanted = spec(nbytes)
        found = WeightClient(client).get(wanted, load, timeout_s=60)
        array = found.numpy(wanted.name)
        say(loaded=len(found.loaded), sum=int(array.sum(dtype=np.uint64)), wrong=len(found.verify()))
        for line in sys.stdin:
            if line == "pss\n":
                say(pss=mapped("Pss"), rss=mapped("Rss"))
            elif line == "write\n":
                ctypes.memset(array.ctypes.data, 1, 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), "hold" in sys.argv[4:])
