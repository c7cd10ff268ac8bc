"""Which device an engine takes where none is named, and what follows from it: each case in a process of its own, with a
driver that is played and packages that are looked at and never imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_flow.compute.errors import BadRequest
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.testing import tiny_checkpoint

DRIVER = '''
import ctypes, os

class Driver:
    """As CUDA's: with CUDA_VISIBLE_DEVICES empty there is no device, and who was forked from a process that has
    initialised it can't use it."""

    initialised = 0

    def cuInit(self, flags):
        Driver.initialised = Driver.initialised or os.getpid()
        if os.environ.get("PLAYED") == "broken":
            os._exit(9)
        return 100 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 1
        return 0 if Driver.initialised == os.getpid() else 3

    def cuGetErrorName(self, code, name):
        return 0

real = ctypes.CDLL
ctypes.CDLL = lambda name, *more, **named: Driver() if name == "libcuda.so.1" else real(name, *more, **named)
'''
NO_DRIVER = """
import ctypes, subprocess

def none(name, *more, **named):
    if name == "libcuda.so.1":
        raise OSError("libcuda.so.1: cannot open shared object file")
    return real(name, *more, **named)

real, ctypes.CDLL = ctypes.CDLL, none
subprocess.run = None  # without a driver there is nobody to ask
"""
DECIDE = """
import json, sys
import msgspec
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.models.engine_role import EngineRole

folder, engine = sys.argv[1], json.loads(sys.argv[2])
role = EngineRole(folder, engine=engine)
(pool,) = EngineRole.kv_pools(folder, engine=engine)
print(json.dumps({"engine": msgspec.to_builtins(role.engine.config), "pool": msgspec.to_builtins(pool)}))
"""
CPU = ("cpu", "float32", 16, False)
GPU = ("cuda", "bfloat16", 64, True)
TOKEN_VALUES = 3 * (32 + 16)


class Machine:
    """A machine with a GPU and what an engine needs on one, until something is taken away.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.site = root / "site"
        self.model = tiny_checkpoint("deepseek_v2", root / "model")
        self.environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        for package in ("torch", "sgl_kernel"):
            (self.site / package).mkdir(parents=True)
            (self.site / package / "__init__.py").write_text(f"raise RuntimeError('{package} was imported')")
        self.torch("'13.0'")
        (self.site / "sitecustomize.py").write_text(DRIVER)

    def torch(self, cuda: str) -> None:
        """Another build of PyTorch; `cuda` is what its `version.cuda` is, in Python."""
        text = f"from typing import Optional\n__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n"
        (self.site / "torch" / "version.py").write_text(text)

    def names(self, **entries: str) -> None:
        """Entries of the checkpoint's config.json; all that name a dtype are these."""
        path = self.model / "config.json"
        config = {name: value for name, value in json.loads(path.read_text()).items() if "dtype" not in name}
        path.write_text(json.dumps(config | entries))

    def python(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run code there."""
        paths = [str(self.site), *(path for path in sys.path if path)]
        environment = self.environment | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)

    def decides(self, **engine: Any) -> tuple[tuple[str, str, int, bool], dict[str, Any], str]:
        """What a role's engine is told, the pool that the launcher makes for it, and what was logged."""
        done = self.python(DECIDE, str(self.model), json.dumps(engine))
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        config = said["engine"]
        fields = (config["device"], config["dtype"], config["page_size"], config["overlap"])
        return fields, said["pool"], done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_with_a_gpu_the_engine_is_on_it_and_its_pool_too(machine: Machine) -> None:
    fields, pool, said = machine.decides()
    assert fields == GPU
    assert (pool["l1_device"], pool["planes"]) == (0, 3)
    assert pool["page_bytes"] == 64 * TOKEN_VALUES * 2
    assert pool["l1_pages"] == 8192 // 64 + 128
    assert said == ""


def without_driver(machine: Machine) -> None:
    (machine.site / "sitecustomize.py").write_text(NO_DRIVER)


def with_hidden_devices(machine: Machine) -> None:
    machine.environment["CUDA_VISIBLE_DEVICES"] = ""


@pytest.mark.parametrize("change", [without_driver, with_hidden_devices])
def test_without_a_gpu_that_is_shown_the_engine_is_on_the_cpu(machine: Machine, change: Any) -> None:
    change(machine)
    fields, pool, said = machine.decides()
    assert fields == CPU
    assert (pool["l1_device"], pool["planes"], pool["page_bytes"]) == (-1, 1, 16 * TOKEN_VALUES * 4)
    assert said == ""


def with_torch_for_a_cpu(machine: Machine) -> None:
    machine.torch("None")


def without_kernels(machine: Machine) -> None:
    (machine.site / "sgl_kernel" / "__init__.py").unlink()
    (machine.site / "sgl_kernel").rmdir()


@pytest.mark.parametrize(("change", "lack"), [(with_torch_for_a_cpu, "PyTorch"), (without_kernels, "sglang-kernel")])
def test_a_gpu_that_the_packages_can_not_use_is_left_alone_and_one_line_says_why(
    machine: Machine, change: Any, lack: str
) -> None:
    change(machine)
    fields, pool, said = machine.decides()
    assert (fields, pool["l1_device"]) == (CPU, -1)
    (line,) = said.splitlines()
    assert "has a GPU" in line
    assert lack in line


@pytest.mark.parametrize(
    ("named", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_on_a_gpu_the_dtype_is_that_of_a_checkpoint_of_16_bits(
    machine: Machine, named: dict[str, str], dtype: str
) -> None:
    machine.names(**named)
    assert machine.decides()[0] == ("cuda", dtype, 64, True)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"device": "cpu"}, CPU),
        ({"dtype": "float16", "page_size": 32, "overlap": False}, ("cuda", "float16", 32, False)),
    ],
)
def test_what_is_given_goes_before_what_the_device_would_decide(
    machine: Machine, given: dict[str, Any], fields: tuple[str, str, int, bool]
) -> None:
    got, pool, said = machine.decides(**given)
    assert got == fields
    assert pool["l1_device"] == (0 if fields[0] == "cuda" else -1)
    assert said == ""


def test_cuda_that_is_named_is_taken_without_asking_anybody() -> None:
    config = EngineConfig(model="m", device="cuda")
    assert (config.device, config.dtype, config.page_size, config.overlap, config.awake_s) == (*GPU, 3.0)


def test_a_process_that_has_decided_can_fork_children_that_use_cuda(machine: Machine) -> None:
    code = """
import os
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.data import cuda
assert EngineConfig(model="m").device == "cuda"
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert EngineConfig(model="m").device == "cuda"
assert cuda.available()
"""
    done = machine.python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_driver_that_gives_no_answer_is_named_with_what_to_do(machine: Machine) -> None:
    machine.environment["PLAYED"] = "broken"
    done = machine.python("from omni_flow.compute.sglang.config import EngineConfig; EngineConfig(model='m')")
    assert "SystemRefusal: the CUDA driver can't be asked, status 9" in done.stderr
    assert "CUDA_VISIBLE_DEVICES" in done.stderr


@pytest.mark.parametrize("field", [{"device": "tpu"}, {"dtype": "int4"}, {"page_size": 1}])
def test_a_device_or_dtype_or_page_that_no_engine_has_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=str(next(iter(field.values())))):
        EngineConfig(model="m", **field)
