"""Run by `test_takeover.py` in a process of its own: puts the hooks in and disables one at a time, those of a CPU and
those of a GPU, then starts an engine over a memory manager and takes its parts away one by one. Prints one JSON object:
what each check said."""

from __future__ import annotations

import json
import os
import pkgutil
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from omni_flow.compute.checkpoint import read_config
from omni_flow.compute.errors import HookFailed
from omni_flow.compute.kv_layout import kv_layout
from omni_flow.compute.sglang import cpu_fixes, plugin, takeover, worker
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.pages import PageBook
from omni_flow.compute.sglang.pagesource import LocalPages
from omni_flow.compute.sglang.shim import prepare_cpu
from omni_flow.compute.sglang.wire import Inlet
from omni_flow.data.launch import start
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

DEVICES = {"cpu": True, "gpu": False}


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


def unentered() -> str:
    """Table → what is said where SGLang has lost what was entered there."""
    load()
    handlers = pkgutil.resolve_name(cpu_fixes.HANDLERS)._handlers
    found = {}
    for target, _ in plugin.entries():
        if target == plugin.PREFILL_MODELS:
            pkgutil.resolve_name(target).remove(plugin.PREFILL_GRAPHS)
        else:
            handlers[cpu_fixes.ATTENTION] = handlers["triton"]
        found[target] = said(plugin.verify_hooks)
    return json.dumps(found)


def hooks(config: EngineConfig, cpu: bool) -> str:
    book = PageBook(LocalPages(8))
    takeover.install(
        takeover.Takeover(
            book, config.page_size, worker.namespace_of(config), cpu=cpu, step_hook=config.step_hook, tail_graph=True
        )
    )
    targets = [target for target, _, _ in plugin.hooks()]
    for target in targets:
        pkgutil.resolve_name(target)
    checks = {"undone": partial(undone, targets), "renamed": partial(renamed, targets), "unentered": unentered}
    return json.dumps({name: json.loads(in_child(check)) for name, check in checks.items()})


def parts(config: EngineConfig) -> dict[str, str]:
    """Part → what is said when SGLang has another in its place."""
    scheduler = worker.start(config, Inlet(socket.socketpair()[0]))
    runner = scheduler.tp_worker.model_runner
    found = {"": said(lambda: plugin.verify(scheduler))}

    def without(name: str, owner: Any, attribute: str, other: Callable[[Any], Any]) -> None:
        ours = getattr(owner, attribute)
        setattr(owner, attribute, other(ours))
        found[name] = said(lambda: plugin.verify(scheduler))
        setattr(owner, attribute, ours)

    for name, owner, attribute in (
        ("prefix cache", scheduler, "tree_cache"),
        ("allocator", scheduler, "token_to_kv_pool_allocator"),
        ("sampler", runner, "sampler"),
        ("attention", runner, "attn_backend"),
    ):
        without(name, owner, attribute, lambda ours: type(ours).__mro__[1])
    without("KV buffers", runner.token_to_kv_pool, "kv_buffer", lambda ours: [plane.clone() for plane in ours])
    without("step hook", takeover.current(), "steps", lambda ours: None)
    return found


def main() -> None:
    folder, path = sys.argv[1:]
    config = EngineConfig(
        model=folder, max_tokens=512, manager=path, pool="kv", step_hook="step_hooks:Codes",
        hidden=True,
    )  # fmt: skip
    page_bytes = kv_layout(read_config(folder)).page_bytes(config.page_size, config.dtype)
    pool = PoolSpec(name=config.pool, page_bytes=page_bytes, l1_pages=200, padding=1)
    manager = start(ServerConfig(path=config.manager, pools=(pool,), huge=False))
    try:
        prepare_cpu()
        found = {name: json.loads(in_child(partial(hooks, config, cpu))) for name, cpu in DEVICES.items()}
        print(json.dumps({"hooks": found, "parts": parts(config)}))
        sys.stdout.flush()
    finally:
        manager.terminate()
        manager.wait(20)
    os._exit(0)


if __name__ == "__main__":
    main()
