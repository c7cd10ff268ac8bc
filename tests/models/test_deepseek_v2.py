"""DeepSeek-V2's layout, processor and tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omni_flow.compute.checkpoint import check_tensors, checkpoint_revision, read_config, read_tensors
from omni_flow.compute.errors import BadCheckpoint
from omni_flow.compute.kv_layout import kv_layout
from omni_flow.models.deepseek_v2.layout import DeepseekV2Config
from omni_flow.models.tokenizer import ChatMessage, Processor
from omni_flow.testing import tiny_checkpoint

GOLDENS = Path(__file__).parent.parent / "goldens"
LITE = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
FULL = LITE | {
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
}


def parameters(config: dict[str, object]) -> int:
    return sum(int(np.prod(shape)) for shape in DeepseekV2Config.read(config).tensors().values())


def test_the_published_sizes_have_the_published_numbers_of_parameters() -> None:
    assert parameters(LITE) == 15_706_484_224
    assert round(parameters(FULL) / 1e9, 2) == 235.74


def test_a_token_takes_the_published_bytes_of_kv() -> None:
    assert kv_layout(LITE).token_bytes("bfloat16") == 31_104
    assert kv_layout(FULL).token_bytes("bfloat16") == 69_120
    assert kv_layout(LITE).page_bytes(64, "bfloat16") == 64 * 31_104


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "deepseek_v2"])
def test_the_tensors_are_those_that_the_reference_implementation_saves(model: str) -> None:
    check_tensors(GOLDENS / model, DeepseekV2Config.read(read_config(GOLDENS / model)).tensors())


@pytest.mark.parametrize("layout", ["lite", "full"])
def test_a_tiny_checkpoint_has_the_official_layout_and_is_the_same_each_time(tmp_path: Path, layout: str) -> None:
    one = tiny_checkpoint("deepseek_v2", tmp_path / "one", layout=layout)
    two = tiny_checkpoint("deepseek_v2", tmp_path / "two", layout=layout)
    check_tensors(one, DeepseekV2Config.read(read_config(one)).tensors())
    assert checkpoint_revision(one) == checkpoint_revision(two)
    other = tiny_checkpoint("deepseek_v2", tmp_path / "other", layout=layout, seed=1)
    assert checkpoint_revision(one) != checkpoint_revision(other)


def test_a_checkpoint_that_does_not_fit_is_refused_with_the_names(tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    expected = DeepseekV2Config.read(read_config(folder)).tensors()
    tensors.pop("model.norm.weight")
    tensors["model.extra.weight"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].copy()
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadCheckpoint) as caught:
        check_tensors(folder, expected)
    for words in (
        "missing: model.norm.weight",
        "unknown: model.extra.weight",
        "lm_head.weight is (257, 64), not (258, 64)",
        "model.layers.0.mlp.up_proj.weight is I8",
    ):
        assert words in str(caught.value)


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(BadCheckpoint, match=r"no \.safetensors"):
        read_tensors(tmp_path)
    folder = tiny_checkpoint("deepseek_v2", tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(BadCheckpoint, match="ends before"):
        read_tensors(folder)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(BadCheckpoint, match="header"):
        read_tensors(folder)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "copy.safetensors").write_bytes(whole)
    with pytest.raises(BadCheckpoint, match=r"in copy\.safetensors and in model\.safetensors"):
        read_tensors(folder)


def test_a_config_without_a_field_names_it() -> None:
    config = {name: value for name, value in LITE.items() if name != "kv_lora_rank"}
    with pytest.raises(BadCheckpoint, match="lacks kv_lora_rank"):
        DeepseekV2Config.read(config)
    with pytest.raises(BadCheckpoint, match="hidden_size should be"):
        DeepseekV2Config.read(LITE | {"hidden_size": "big"})


def test_a_conversation_becomes_the_published_prompt(tmp_path: Path) -> None:
    processor = Processor(tiny_checkpoint("deepseek_v2", tmp_path))
    messages: list[ChatMessage] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüß dich 🙂"},
        {"role": "assistant", "content": "Hallo!"},
        {"role": "user", "content": "Und?"},
    ]
    ids = list(processor.chat(messages).ids)
    assert ids[0] == 256
    text = "Be brief.\n\nUser: Grüß dich 🙂\n\nAssistant: Hallo!"
    assert ids.count(257) == 1
    assert processor.decode(ids) == text + "User: Und?\n\nAssistant:"
    assert ids.index(257) == 1 + len(text.encode())
    assert list(processor.text("ab").ids) == [256, *processor.text("ab").ids[1:]]


def test_pieces_of_text_never_cut_a_character(tmp_path: Path) -> None:
    processor = Processor(tiny_checkpoint("deepseek_v2", tmp_path))
    text = "a🙂bü"
    pieces = processor.stream()
    got = [pieces.add(token) for token in list(processor.text(text).ids)[1:]]
    assert "".join(got) == text
    assert [piece for piece in got if piece] == ["a", "🙂", "b", "ü"]


def test_an_unknown_tiny_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are: deepseek_v2"):
        tiny_checkpoint("gpt", tmp_path)
    assert json.loads(json.dumps(LITE)) == LITE
