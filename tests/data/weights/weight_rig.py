"""Memory managers and roles in processes of their own, and small tensors for them to share."""

import json
import subprocess
import sys
import time
from pathlib import Path

from weight_role import FAMILY

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.weights.names import TensorSpec, WeightName

MIB = 1 << 20
ROLE = Path(__file__).with_name("weight_role.py")


class Manager:
    """A memory manager process."""

    def __init__(self, path, linger_s=300.0):
        self.config = ServerConfig(path=str(path / "manager.sock"), weight_linger_s=linger_s)
        self.process = start(self.config)

    def client(self, name="test", **options):
        return MemoryManagerClient(self.config.path, name=name, **options)

    def role(self, nbytes=MIB, name="role", *flags):
        return Role([self.config.path, name, str(nbytes), *flags])

    def stop(self):
        self.process.terminate()
        assert self.process.wait(20) == 0


class Role:
    """A role process; leaves with the test."""

    def __init__(self, arguments, script=ROLE):
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"the role ended with {self.process.wait()}"
        return json.loads(line)

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()
        self.process.kill()
        self.process.wait()


def tensors(count, family=FAMILY, nbytes=4096):
    return [TensorSpec(WeightName(family=family, path=f"t{n}", dtype="u8"), (nbytes,)) for n in range(count)]


def number(spec, out):
    out[:] = bytes([int(spec.name.path[1:]) % 256]) * len(out)


def refuse(spec, _out):
    raise AssertionError(f"{spec.name.path} is there already")


def wait_until(client, key, value):
    """Ask the manager until a number of its is `value`; each ask is an event of its loop."""
    end = time.monotonic() + 20
    while (found := client.stats()[key]) != value:
        assert time.monotonic() < end, f"{key} stays {found}, not {value}"
