"""What the page on serving and the dashboard name is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from omni_flow.cli.main import app
from omni_flow.serve import endpoints
from omni_flow.serve.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "serving.md").read_text()


def test_every_metric_of_the_dashboard_is_one_of_the_servers(http: httpx.Client) -> None:
    http.post("/v1/graphs/chat/requests", json={"inputs": {"text": "a"}, "stream": True})
    own = {m.name for m in Metrics().families()}
    own |= {family.name for family in text_string_to_metric_families(http.get("/metrics").text)}
    text = (DOCS / "grafana.json").read_text()
    named = set(re.findall(r"\b(?:omni_flow|process)_[a-z_]+", text))
    for name in named:
        assert re.sub(r"_(bucket|total)$", "", name) in own or name in own, name
    assert json.loads(text)["title"] == "Omni-Flow"


def test_every_flag_and_record_of_the_page_exists() -> None:
    command = get_command(app)
    flags = {f for c in command.commands.values() for p in c.params for f in (*p.opts, *p.secondary_opts)}  # type: ignore[attr-defined]
    for flag in re.findall(r"`(--[a-z-]+)", PAGE):
        assert flag in flags or flag in ("--json", "--minutes", "--ray"), flag
    for name, fields in re.findall(r"^\| `([A-Z]\w+)` \|[^|]*\|([^\n]*)$", PAGE, re.MULTILINE):
        record = getattr(endpoints, name)
        for field in re.findall(r"`(\w+)`", fields):
            assert field in record.__dataclass_fields__, (name, field)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", PAGE))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (DOCS / link).exists()
