"""safetensors files, whole and in shards, and files that lie."""

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_flow.data.errors import BadArgument, DataError, UnknownName
from omni_flow.data.weights.names import Family
from omni_flow.data.weights.safetensors import BadCheckpoint, Checkpoint, read_header

FAMILY = Family("demo/model", "r1")
NAMES = {"float32": "F32", "uint8": "U8", "int64": "I64", "float16": "F16"}


def write(file, tensors, **metadata):
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, value in tensors.items():
        begin = len(data)
        data += value.tobytes()
        header[name] = {
            "dtype": NAMES[str(value.dtype)],
            "shape": list(value.shape),
            "data_offsets": [begin, len(data)],
        }
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def loaded(checkpoint, spec):
    out = bytearray(spec.nbytes)
    checkpoint.load(spec, memoryview(out))
    return bytes(out)


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "model.embed.weight": rng.random((8, 6), np.float32),
        "model.layers.3.up.weight": rng.random((4, 6, 2)).astype(np.float16),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
    }


def test_every_tensor_comes_as_it_was_written(tmp_path, tensors):
    write(tmp_path / "model.safetensors", tensors, format="pt")
    checkpoint = Checkpoint(tmp_path / "model.safetensors", FAMILY)
    assert {spec.name.path for spec in checkpoint.specs()} == set(tensors)
    for spec in checkpoint.specs():
        assert loaded(checkpoint, spec) == tensors[spec.name.path].tobytes()
    assert checkpoint.spec("model.layers.3.up.weight").name.layer == 3
    assert checkpoint.spec("scalar").name.layer == -1


@pytest.mark.parametrize(("axis", "count"), [(0, 2), (0, 4), (1, 2), (1, 3), (2, 2)])
def test_a_shard_is_the_equal_part_of_its_axis(tmp_path, tensors, axis, count):
    write(tmp_path / "m.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path, FAMILY)
    whole = tensors["model.layers.3.up.weight"]
    for index, part in enumerate(np.split(whole, count, axis)):
        spec = checkpoint.spec("model.layers.3.up.weight", axis=axis, index=index, count=count)
        assert spec.shape == part.shape
        assert loaded(checkpoint, spec) == part.tobytes()


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path, tensors):
    names = list(tensors)
    write(tmp_path / "model-1.safetensors", {name: tensors[name] for name in names[:2]})
    write(tmp_path / "model-2.safetensors", {name: tensors[name] for name in names[2:]})
    where = {name: f"model-{1 + (n > 1)}.safetensors" for n, name in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    checkpoint = Checkpoint(tmp_path, FAMILY)
    assert {spec.name.path: loaded(checkpoint, spec) for spec in checkpoint.specs()} == {
        name: value.tobytes() for name, value in tensors.items()
    }
    index.write_text(json.dumps({"weight_map": {**where, "more": "model-1.safetensors"}}))
    with pytest.raises(BadCheckpoint, match="more"):
        Checkpoint(tmp_path, FAMILY)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(BadCheckpoint, match="outside its directory"):
        Checkpoint(tmp_path, FAMILY)
    index.write_text("[]")
    with pytest.raises(BadCheckpoint, match="weight_map"):
        Checkpoint(tmp_path, FAMILY)


def test_what_is_not_there_is_named(tmp_path, tensors):
    with pytest.raises(UnknownName, match="no safetensors"):
        Checkpoint(tmp_path, FAMILY)
    write(tmp_path / "m.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path, FAMILY)
    with pytest.raises(UnknownName, match="nothing"):
        checkpoint.spec("nothing")
    with pytest.raises(BadArgument, match="in 5 parts"):
        checkpoint.spec("model.embed.weight", axis=0, count=5)


def test_a_truncated_file_is_refused(tmp_path, tensors):
    file = tmp_path / "m.safetensors"
    write(file, tensors)
    whole = file.read_bytes()
    for length in (0, 7, 8, 40, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint):
            read_header(file)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_header_crashes_the_reader_or_leads_out_of_the_file(tmp_path, data):
    file = tmp_path / "m.safetensors"
    value = st.integers(-5, 100) | st.text(max_size=3) | st.lists(st.integers(-5, 100), max_size=3) | st.none()
    info = st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "U8", "Q4"]) | value,
            "shape": st.lists(st.integers(-1, 9), max_size=3) | value,
            "data_offsets": st.lists(st.integers(-1, 60), min_size=2, max_size=2) | value,
        },
    )
    header = data.draw(st.dictionaries(st.text(max_size=5), info | value, max_size=3))
    raw = data.draw(st.just(json.dumps(header).encode()) | st.binary(max_size=60))
    file.write_bytes(struct.pack("<Q", data.draw(st.just(len(raw)) | st.integers(0, 1 << 63))) + raw + bytes(50))
    try:
        found = read_header(file)
    except DataError:
        return
    for tensor in found.values():
        assert tensor.offset + tensor.nbytes <= file.stat().st_size
