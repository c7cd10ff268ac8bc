"""Weights between real processes: loaded once, shared in memory, handed over at death, switched at once."""

import contextlib
import fcntl
import importlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_rig import MIB, Manager, Role, number, refuse, tensors, wait_until
from weight_role import FAMILY, fill, spec
from weight_steps import STEPS

from omni_flow.data.errors import DataError, OutOfMemory, Refused, StaleEpoch, UnknownName
from omni_flow.data.launch import start
from omni_flow.data.weights import messages as m
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.errors import LoaderKeepsView, LoadingElsewhere, SwitchRefused
from omni_flow.data.weights.messages import arena_name
from omni_flow.data.weights.safetensors import Checkpoint

STEPS_SCRIPT = Path(__file__).with_name("weight_steps.py")


def test_two_processes_hold_one_copy(roles):
    size = 64 * MIB
    first = roles(size, "first")
    said = first.hear()
    second = roles(size, "second")
    assert said["loaded"] == 1
    assert second.hear() == {**said, "loaded": 0}
    memory = []
    for role in (first, second):
        role.tell("pss")
        memory.append(role.hear())
    assert [each["rss"] for each in memory] == [size, size]
    assert sum(each["pss"] for each in memory) == pytest.approx(size, rel=0.02)


def test_one_of_many_loads_and_all_get_the_same(roles):
    crowd = [roles(MIB, f"role{n}") for n in range(5)]
    said = [role.hear() for role in crowd]
    assert sum(each["loaded"] for each in said) == 1
    assert len({each["sum"] for each in said}) == 1
    assert not any(each["wrong"] for each in said)


def test_the_death_of_the_loader_hands_over_to_one_waiter(manager, roles):
    loader = roles(MIB, "loader", "hold")
    assert loader.hear() == {"loading": True}
    waiters = [roles(MIB, f"waiter{n}", "hold") for n in range(2)]
    with manager.client() as client:
        wait_until(client, "weight_waits", 2)
        loader.kill()
        ready, _, _ = select.select([waiter.process.stdout for waiter in waiters], [], [], 30)
        heir = next(waiter for waiter in waiters if waiter.process.stdout in ready)
        other = next(waiter for waiter in waiters if waiter is not heir)
        assert heir.hear() == {"loading": True}
        wait_until(client, "weight_waits", 1)
        heir.tell("go on")
        assert heir.hear()["loaded"] == 1
        assert other.hear()["loaded"] == 0


@pytest.mark.parametrize("step", STEPS)
def test_a_client_killed_after_any_step_of_the_protocol_leaves_nothing_half_done(manager, step):
    loader = Role([manager.config.path, str(MIB), step], STEPS_SCRIPT)
    assert loader.hear() == {"step": step}
    loader.kill()
    loader.close()
    with manager.client() as client:
        wait_until(client, "sessions", 1)
        found = WeightClient(client).get(spec(MIB), lambda _, out: fill(out))
        assert len(found.loaded) == (step not in ("sealed", "released"))
        expected = np.empty(MIB, np.uint8)
        fill(expected)
        assert np.array_equal(found.numpy(spec(MIB).name), expected)
        assert found.verify() == []


ops = st.integers(m.W_GET, 0x6F)
bodies = st.recursive(
    st.none() | st.integers(-5, 1 << 64 - 1) | st.text(max_size=4) | st.binary(max_size=20) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(op=ops, body=bodies)
def test_no_message_takes_the_manager_down(manager, op, body):
    with manager.client() as client:
        with contextlib.suppress(DataError):
            client.call(op, body)
        client.ping()


def test_the_death_of_the_loader_after_sealing_changes_nothing(manager, roles):
    loader = roles(MIB, "loader")
    before = loader.hear()
    loader.kill()
    assert roles(MIB, "next").hear() == {**before, "loaded": 0}


def test_a_role_cannot_write_what_others_read(manager, roles):
    role = roles(MIB, "writer")
    role.hear()
    role.tell("write")
    assert role.process.wait(20) == -signal.SIGSEGV
    assert roles(MIB, "reader").hear()["wrong"] == 0


def test_a_sealed_segment_cannot_be_mapped_writable_by_its_loader_either(manager):
    with manager.client() as client:
        found = WeightClient(client).get(spec(MIB), lambda _, out: fill(out))
        segment = arena_name(found.entry(spec(MIB).name).segment)
        with pytest.raises(OutOfMemory, match="mapping"):
            client.arena(segment, write=True)


def test_a_segment_is_mapped_only_by_who_has_asked_for_its_tensors(manager):
    with manager.client() as owner, manager.client() as other:
        found = WeightClient(owner).get(spec(MIB), lambda _, out: fill(out))
        with pytest.raises(Refused, match="get its tensors first"):
            other.arena(arena_name(found.entry(spec(MIB).name).segment))


def test_a_loader_that_fails_gives_its_error_and_the_next_loads(manager):
    def fail(_spec, _out):
        raise OSError("the disk is on fire")

    with manager.client() as first, manager.client() as second:
        with pytest.raises(OSError, match="on fire"):
            WeightClient(first).get(tensors(3), fail)
        assert first.stats()["weight_loading"] == 0
        found = WeightClient(second).get(tensors(3), number)
        assert len(found.loaded) == 3


def test_a_loader_that_keeps_a_view_is_told_so(manager):
    kept = []
    with manager.client() as client:
        with pytest.raises(LoaderKeepsView, match="drop its views"):
            WeightClient(client).get(tensors(1), lambda _, out: kept.append(np.frombuffer(out, np.uint8)))
        kept.clear()
        assert WeightClient(client).get(tensors(1), number).verify() == []


def test_weights_beyond_the_memory_there_is_are_refused_before_they_are_loaded(manager):
    with manager.client() as client:
        with pytest.raises(OutOfMemory, match="are available"):
            WeightClient(client).get(tensors(1, nbytes=1 << 46), refuse)
        assert client.stats()["weight_loading"] == 0


def test_a_wait_for_another_loader_has_a_deadline_and_names_it(manager, roles):
    loader = roles(MIB, "slowpoke", "hold")
    loader.hear()
    with manager.client() as client, pytest.raises(LoadingElsewhere, match="slowpoke") as caught:
        WeightClient(client).get(spec(MIB), refuse, timeout_s=0.05)
    assert [holder.pid for holder in caught.value.holders] == [loader.process.pid]


def test_who_has_imported_the_client_alone_gets_its_errors_by_their_classes():
    code = "from omni_flow.data.weights.client import SwitchRefused; from omni_flow.data.errors import from_code as f"
    code += (
        "; print(*(type(f(c, '', '')).__name__ for c in ('loading-elsewhere', 'loader-keeps-view', 'switch-refused')))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "LoadingElsewhere LoaderKeepsView SwitchRefused\n"


def test_more_tensors_than_fit_a_message_are_of_one_version(manager):
    with manager.client() as client:
        wanted = tensors(700, nbytes=64)
        found = WeightClient(client).get(wanted, number)
        assert [bytes(found.bytes(each.name))[0] for each in wanted] == [n % 256 for n in range(700)]
        assert len(WeightClient(client).manifest(FAMILY)) == 700


def test_tensors_are_shared_one_by_one(manager):
    with manager.client() as first, manager.client() as second:
        some, all_four = tensors(2), tensors(4)
        kept = WeightClient(first).get(some, number)
        found = WeightClient(second).get(all_four, number)
        assert [name.path for name in found.loaded] == ["t2", "t3"]
        assert found.entry(some[0].name).segment == kept.entry(some[0].name).segment


def test_weights_linger_after_their_last_user_and_then_give_their_memory_back(tmp_path):
    manager = Manager(tmp_path, linger_s=0.2)
    with manager.client() as watcher:
        with manager.client() as user:
            WeightClient(user).get(tensors(2), number)
            assert watcher.stats()["weight_segments"] == 1
        wait_until(watcher, "weight_segments", 0)
        links = [os.readlink(entry) for entry in Path(f"/proc/{manager.process.pid}/fd").iterdir()]
        assert not [link for link in links if "omni-weights" in link]
    manager.stop()


def test_an_engine_that_restarts_within_the_linger_maps_and_loads_nothing(manager):
    with manager.client() as engine:
        WeightClient(engine).get(tensors(2), number)
    with manager.client() as engine:
        wait_until(engine, "weight_segments_idle", 1)
        assert WeightClient(engine).get(tensors(2), refuse).loaded == []


def test_released_weights_stay_readable_through_arrays_in_use(tmp_path):
    manager = Manager(tmp_path, linger_s=0.0)
    with manager.client() as client:
        found = WeightClient(client).get(tensors(2), number)
        array = found.numpy(tensors(2)[1].name)
        found.release()
        wait_until(client, "weight_segments", 0)
        assert (array == 1).all()
        with pytest.raises(UnknownName):
            found.bytes(tensors(2)[1].name)
    manager.stop()


def test_a_new_version_is_staged_beside_the_old_and_switched_at_once(manager):
    wanted = tensors(3)
    told = []
    with manager.client() as trainer, manager.client() as engine, manager.client() as late:
        serving = WeightClient(engine)
        old = serving.get(wanted, number)
        assert serving.subscribe(FAMILY, lambda family, version: told.append((family, version))) == 0
        staged = WeightClient(trainer).get(
            wanted, lambda _, out: out.__setitem__(slice(None), b"\7" * len(out)), version=1
        )
        assert staged.version == 1
        assert WeightClient(late).get(wanted, refuse).version == 0
        assert WeightClient(trainer).switch(FAMILY, 1) == 0
        engine.ping()
        assert told == [(FAMILY, 1)]
        assert [bytes(old.bytes(each.name))[0] for each in wanted] == [0, 1, 2]
        fresh = WeightClient(late).get(wanted, refuse)
        assert fresh.version == 1
        assert {bytes(fresh.bytes(each.name))[0] for each in wanted} == {7}
        with pytest.raises(SwitchRefused):
            WeightClient(trainer).switch(FAMILY, 1)


def test_a_version_that_lacks_tensors_is_not_switched_to(manager):
    with manager.client() as client:
        weights = WeightClient(client)
        weights.get(tensors(3), number)
        weights.get(tensors(2), number, version=1)
        with pytest.raises(SwitchRefused, match="lacks t2"):
            weights.switch(FAMILY, 1)


def test_a_read_only_session_waits_for_a_loader(manager, roles):
    with manager.client("viewer", read_only=True) as viewer:
        with pytest.raises(LoadingElsewhere, match="nobody"):
            WeightClient(viewer).get(spec(MIB), refuse, timeout_s=0.05)
        roles(MIB, "loader").hear()
        assert WeightClient(viewer).get(spec(MIB), refuse).loaded == []
        with pytest.raises(Refused, match="read-only"):
            WeightClient(viewer).switch(FAMILY, 1)


def test_after_the_manager_was_killed_mapped_weights_stay_and_new_ones_are_loaded_anew(tmp_path):
    manager = Manager(tmp_path)
    with manager.client() as client:
        weights = WeightClient(client)
        old = weights.get(tensors(2), number)
        manager.process.kill()
        manager.process.wait()
        manager.process = start(manager.config)
        with pytest.raises(StaleEpoch):
            weights.get(tensors(2), number)
        assert len(weights.get(tensors(2), number).loaded) == 2
        assert old.verify() == []
        old.release()
        assert client.check() == []
    manager.stop()


def test_a_checkpoint_goes_from_its_file_into_shared_memory_with_equal_bytes(manager, tmp_path):
    torch = importlib.import_module("torch")
    rng = np.random.default_rng(3)
    raw = {"a.weight": rng.integers(0, 1 << 16, (6, 8), np.uint16), "b.weight": rng.random((4,), np.float32)}
    header, data = {}, b""
    for (path, value), dtype in zip(raw.items(), ("BF16", "F32"), strict=True):
        header[path] = {"dtype": dtype, "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    checkpoint = Checkpoint(tmp_path, FAMILY)
    with manager.client() as first, manager.client() as second:
        whole = WeightClient(first).get(checkpoint.specs(), checkpoint.load)
        shards = [checkpoint.spec("a.weight", axis=1, index=n, count=2) for n in range(2)]
        found = WeightClient(second).get([*checkpoint.specs(), *shards], checkpoint.load)
        assert len(whole.loaded) == 2
        assert found.loaded == [shard.name for shard in shards]
        assert bytes(found.bytes(checkpoint.spec("b.weight").name)) == raw["b.weight"].tobytes()
        joined = torch.cat([found.torch(shard.name) for shard in shards], dim=1)
        assert joined.dtype == torch.bfloat16
        assert torch.equal(joined.view(torch.int16), torch.from_numpy(raw["a.weight"].view(np.int16)))
        assert bytes(found.bytes(checkpoint.spec("a.weight").name)) == raw["a.weight"].tobytes()


def test_memory_files_of_weights_carry_all_seals(manager):
    with manager.client() as client:
        WeightClient(client).get(tensors(1), number)
        client.ping()
        fds = list(Path(f"/proc/{manager.process.pid}/fd").iterdir())
        (sealed,) = [fd for fd in fds if "omni-weights" in os.readlink(fd)]
        with open(sealed, "rb") as file:
            seals = fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS)
            for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SEAL):
                assert seals & seal
        with open(sealed, "r+b") as file, pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), 4096)
