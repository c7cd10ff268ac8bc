"""Weights on a device between real processes; the driver below them is made of host memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.server_config import ServerConfig

SCRIPT = str(Path(__file__).with_name("device_of_host_memory.py"))
MIB = 1 << 20


class Role:
    def __init__(self, path, *flags):
        command = [sys.executable, SCRIPT, "role", path, *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"the role ended with {self.process.wait()}"
        return json.loads(line)

    def tell(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def ask(self, word):
        self.tell(word)
        return self.hear()

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=("vmm", "ipc"))
def sharing(request):
    return request.param


@pytest.fixture
def path(tmp_path, sharing):
    config = ServerConfig(path=str(tmp_path / "m.sock"), weight_linger_s=0.0, device_memory=sharing)
    read, write = os.pipe()
    command = [sys.executable, SCRIPT, "serve", msgspec.json.encode(config).decode(), "--ready-fd", str(write)]
    with subprocess.Popen(command, pass_fds=(write,)) as process:
        os.close(write)
        with open(read, "rb") as ready:
            assert ready.readline()
        yield config.path
        with MemoryManagerClient(config.path, role="viewer") as client:
            assert client.check() == []
            while client.stats()["weight_segments"]:
                assert not client.wait_end(0.02)
            assert client.stats()["internal_errors"] == 0
        process.terminate()
        assert process.wait(20) == 0


@pytest.fixture
def roles(path):
    made = []

    def role(*flags):
        made.append(Role(path, *flags))
        return made[-1]

    yield role
    for each in made:
        each.end()


def test_a_second_process_maps_what_the_first_has_loaded_and_it_counts_once(path, roles):
    first = roles()
    assert first.hear() == {"loaded": 2, "right": True, "rotten": 0}
    second = roles()
    assert second.hear() == {"loaded": 0, "right": True, "rotten": 0}
    for role in (first, second):
        role.ask("pss")  # after this both have all pages mapped
    assert sum(role.ask("pss")["pss"] for role in (first, second)) <= 10 * MIB
    with MemoryManagerClient(path, role="viewer") as client:
        assert client.stats()["weight_segments"] == 1
        assert 8 * MIB <= client.stats()["weight_device_bytes"] < 9 * MIB


@pytest.mark.parametrize("sharing", ["vmm"], indirect=True)
def test_sealed_weights_on_a_device_are_read_only_for_all(roles):
    first, second = roles(), roles()
    assert {first.hear()["loaded"], second.hear()["loaded"]} == {0, 2}
    assert [role.ask("open") for role in (first, second)] == [{"error": "refused"}] * 2
    for role in (first, second):
        role.tell("write")
        assert role.process.wait(20) == -signal.SIGSEGV


def test_the_death_of_the_loader_hands_over_and_the_weights_outlive_who_loaded_them(roles):
    first = roles("hold")
    assert first.hear() == {"loading": True}
    second = roles()
    first.end()
    assert second.hear() == {"loaded": 2, "right": True, "rotten": 0}
    third = roles()
    assert third.hear()["loaded"] == 0
    second.end()
    assert third.ask("pss")["pss"] >= 8 * MIB
    assert third.ask("release") == {"pss": 0}


def test_host_memory_and_each_device_have_copies_of_their_own(roles):
    role = roles()
    role.hear()
    assert role.ask("host") == {"loaded": 2, "entries": [0, 0, -1, -1]}
    assert role.ask("elsewhere") == {"error": "system"}
    assert role.ask("pss")["pss"] >= 8 * MIB
