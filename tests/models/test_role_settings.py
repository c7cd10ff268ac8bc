"""Settings of an engine role that come from the environment."""

from __future__ import annotations

import json

import pytest

from omni_flow.compute.errors import BadRequest
from omni_flow.models.role_settings import role_settings


def test_the_fields_of_the_variable_are_what_a_role_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"max_tokens": 131072, "extra": {"mem_fraction_static": 0.85}}
    monkeypatch.setenv("SOME_ENGINE", json.dumps(given))
    assert role_settings("SOME_ENGINE") == {"engine": given}
    monkeypatch.setenv("SOME_ENGINE", json.dumps(given | {"l2_tokens": 5000, "cache_tokens": 600}))
    assert role_settings("SOME_ENGINE") == {"engine": given, "l2_tokens": 5000, "cache_tokens": 600}


@pytest.mark.parametrize("text", [None, "", " "])
def test_without_the_variable_there_are_none(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_ENGINE", raising=False)
    if text is not None:
        monkeypatch.setenv("SOME_ENGINE", text)
    assert role_settings("SOME_ENGINE") == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"max_tokens": 131072', "truncated"),
        ("[131072]", "array"),
        ('{"max_tokenz": 131072}', "max_tokenz"),
        ('{"max_tokens": "many"}', "max_tokens"),
        ('{"max_tokens": 100}', "max_tokens 100"),
        ('{"device": "tpu"}', "tpu"),
        ('{"l2_tokens": -1}', "l2_tokens"),
        ('{"cache_tokens": true}', "cache_tokens"),
        ('{"model": "elsewhere"}', "model"),
    ],
)
def test_what_is_wrong_is_refused_with_the_names_of_the_variable_and_the_field(
    text: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_ENGINE", text)
    with pytest.raises(BadRequest, match=f"SOME_ENGINE: .*{named}"):
        role_settings("SOME_ENGINE")
