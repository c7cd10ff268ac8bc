"""Run by `test_takeover.py` in a process of its own: puts the hooks in and disables one at a time, then starts an
engine and takes its parts away one by one. Prints one JSON object: what each check said."""

from __future__ import annotations

import json
import os
import pkgutil
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from omni_flow.compute.errors import HookFailed
from omni_flow.compute.sglang import plugin, takeover, worker
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.pages import PageBook
from omni_flow.compute.sglang.pagesource import LocalPages
from omni_flow.compute.sglang.shim import prepare_cpu
from omni_flow.compute.sglang.wire import Inlet


def said(check: Callable[[], None]) -> str:
    """What a check refuses with; "" if it finds nothing."""
    try:
        check()
    except HookFailed as error:
        return error.message
    return ""


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns in a copy of this process, so that hooks put in there are not in here."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, work().encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(write)
    with open(read) as answer:
        text = answer.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def load() -> None:
    from sglang.srt.plugins import load_plugins

    os.environ["SGLANG_PLUGINS"] = "omni_flow"
    load_plugins()


def owner_of(target: str) -> tuple[Any, str]:
    """The module or class that has a target, and the target's name in it."""
    where, _, name = target.rpartition(".")
    return pkgutil.resolve_name(where), name


def renamed(targets: list[str]) -> str:
    """Which of these SGLang has no more once they are deleted (others are inherited), and what is said then."""
    for target in targets:
        delattr(*owner_of(target))
    gone = [target for target in targets if not hasattr(*owner_of(target))]
    load()
    return json.dumps([gone, said(plugin.verify_hooks)])


def undone(targets: list[str]) -> str:
    """Target → what is said where somebody has put SGLang's own back; and "" → what is said with all hooks."""
    originals = [vars(owner)[name] for owner, name in map(owner_of, targets)]
    load()
    found = {"": said(plugin.verify_hooks)}
    for target, original in zip(targets, originals, strict=True):
        owner, name = owner_of(target)
        ours = vars(owner)[name]
        setattr(owner, name, original)
        found[target] = said(plugin.verify_hooks)
        setattr(owner, name, ours)
    return json.dumps(found)


def hooks(config: EngineConfig) -> dict[str, Any]:
    book = PageBook(LocalPages(8))
    takeover.install(takeover.Takeover(book, config.page_size, worker.namespace_of(config), cpu=True))
    targets = [target for target, _, _ in plugin.hooks()]
    for target in targets:
        pkgutil.resolve_name(target)
    return {
        "undone": json.loads(in_child(lambda: undone(targets))),
        "renamed": json.loads(in_child(lambda: renamed(targets))),
    }


def parts(config: EngineConfig) -> dict[str, str]:
    """Part → what is said when SGLang has another in its place."""
    scheduler = worker.start(config, Inlet(socket.socketpair()[0]))
    runner = scheduler.tp_worker.model_runner
    found = {"": said(lambda: plugin.verify(scheduler))}
    for name, owner, attribute in (
        ("prefix cache", scheduler, "tree_cache"),
        ("allocator", scheduler, "token_to_kv_pool_allocator"),
        ("sampler", runner, "sampler"),
        ("attention", runner, "attn_backend"),
    ):
        ours = getattr(owner, attribute)
        setattr(owner, attribute, type(ours).__mro__[1])
        found[name] = said(lambda: plugin.verify(scheduler))
        setattr(owner, attribute, ours)
    return found


def main() -> None:
    config = EngineConfig(model=sys.argv[1], max_tokens=512)
    prepare_cpu()
    answer = in_child(lambda: json.dumps(hooks(config)))
    print(json.dumps({"hooks": json.loads(answer), "parts": parts(config)}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
