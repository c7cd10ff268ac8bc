"""How the spans of a request become one sequence, and what SGLang is told: its attention, how many may wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_flow.compute.engine import Embeddings, Tokens, lay_out
from omni_flow.compute.errors import BadRequest
from omni_flow.compute.sglang.config import EngineConfig, server_arguments
from omni_flow.data import cuda
from omni_flow.data.identity import MediaDigest


def test_spans_follow_each_other_with_placeholders_for_embeddings() -> None:
    rows = np.zeros((3, 8), np.float32)
    layout = lay_out([Tokens([5, 6]), Embeddings(rows, MediaDigest(bytes(32)), 9), Tokens(np.array([7], np.int64))])
    assert layout.ids.dtype == np.int64
    assert layout.ids.tolist() == [5, 6, 9, 9, 9, 7]
    assert [(span.start, span.length) for span in layout.media] == [(2, 3)]
    assert layout.embeddings[0] is rows


@pytest.mark.parametrize("ids", [[1.0], ["1"], [None], [1 << 70], [3, -(1 << 64)], np.zeros((2, 2), np.int64)])
def test_token_ids_that_are_no_integers_are_refused(ids: Any) -> None:
    with pytest.raises(BadRequest, match="no 64-bit integers"):
        lay_out([Tokens(ids)])


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequest, match="without tokens"):
        lay_out([Tokens([])])


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `sgl_kernel` is installed, with FlashAttention 3; to be looked at, for it can't be imported."""
    folder = tmp_path / "sgl_kernel"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("flash_attn.py", "flash_ops.abi3.so"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def attention(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cuda, "compute_capability", lambda _device: capability)
    backend: str = server_arguments(EngineConfig(model="m", device="cuda"))["attention_backend"]
    return backend


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("capability", "backend"), [((9, 0), "fa3"), ((8, 9), "triton"), ((10, 0), "triton")])
def test_attention_follows_the_device(
    capability: tuple[int, int], backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert attention(capability, monkeypatch) == backend
    assert caplog.messages == []


@pytest.mark.parametrize("missing", ["flash_attn.py", "flash_ops.abi3.so"])
def test_kernels_without_flash_attention_3_leave_attention_to_triton_and_a_line_says_so(
    kernels: Path, missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (kernels / missing).unlink()
    assert attention((9, 0), monkeypatch) == "triton"
    (line,) = caplog.messages
    assert "no FlashAttention 3" in line


def test_attention_that_is_named_is_taken_without_asking_a_device() -> None:
    config = EngineConfig(model="m", device="cuda", extra={"attention_backend": "flashinfer"})
    assert server_arguments(config)["attention_backend"] == "flashinfer"


def test_an_engine_has_a_limit_of_waiting_requests_unless_it_is_given_none() -> None:
    assert server_arguments(EngineConfig(model="m"))["max_queued_requests"] == 1024
    assert server_arguments(EngineConfig(model="m", max_waiting=0))["max_queued_requests"] is None
    with pytest.raises(BadRequest, match="max_waiting -1"):
        EngineConfig(model="m", max_waiting=-1)
