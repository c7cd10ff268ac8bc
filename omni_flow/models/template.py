"""The chat template of a checkpoint: where it lies, how it is rendered, and what it writes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omni_flow.compute.errors import BadCheckpoint, BadRequest

if TYPE_CHECKING:
    from jinja2.nodes import Node


class ChatTemplate:
    """A template (Jinja) with what those of checkpoints rely on; it can reach nothing else.

    Raises:
        BadCheckpoint: it is broken.
    """

    def __init__(self, source: str) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # Checkpoints' templates are written for these switches.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            self._tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as wrong:
            raise BadCheckpoint(f"the chat template is broken: {wrong}", "fetch it again") from wrong

    def render(self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
        """The prompt for the next answer of the assistant.

        Args:
            names: texts of special tokens, as `bos_token`.

        Raises:
            BadRequest: the template refuses the conversation.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **names)
        except TemplateError as wrong:
            raise BadRequest(f"the chat template refuses the conversation: {wrong}", "see its roles") from wrong

    def own(self, texts: Iterable[str]) -> set[str]:
        """Those of these texts that it writes and does not look for in messages, as `'</think>' in content` does."""
        written: list[str] = []
        sought: list[str] = []
        _sort(self._tree, written, sought)
        return {text for text in texts if text in "\n".join(written) and text not in "\n".join(sought)}


def _sort(node: Node, written: list[str], sought: list[str]) -> None:
    """The texts under a node of a template: those that it writes, and those that it compares, or gives to a method or a
    filter of a text."""
    from jinja2 import nodes

    if isinstance(node, nodes.TemplateData):
        written.append(node.data)
    elif isinstance(node, nodes.Const) and isinstance(node.value, str):
        written.append(node.value)
    looks = isinstance(node, nodes.Compare) or (isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr))
    for child in node.iter_child_nodes():
        if looks or (isinstance(node, nodes.Filter) and child is not node.node):
            _sort(child, sought, sought)
        else:
            _sort(child, written, sought)


def _refuse(why: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(why)


def template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of a folder: a file of its own, or in its tokenizer_config.json, alone or as `default` among
    several."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((one["template"] for one in found if one["name"] == "default"), None)
    return found
