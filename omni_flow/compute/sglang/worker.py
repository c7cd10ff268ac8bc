"""The engine process: `python -m omni_flow.compute.sglang.worker SOCKET ROWS CONFIG`, two descriptors and JSON. One
model, SGLang's scheduler, one socket.

It ends when the socket does, so it never outlives its role.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from omni_flow.compute.checkpoint import check_tensors, checkpoint_revision, read_config
from omni_flow.compute.errors import BadRequest, ComputeError
from omni_flow.compute.kv_layout import kv_layout
from omni_flow.compute.sglang import plugin, takeover
from omni_flow.compute.sglang.config import TRITON, EngineConfig, server_arguments
from omni_flow.compute.sglang.keeper import Keeper
from omni_flow.compute.sglang.loading import Loader
from omni_flow.compute.sglang.pages import LOT, Fence, PageBook
from omni_flow.compute.sglang.pagesource import LocalPages, PoolPages
from omni_flow.compute.sglang.shared_weights import SharedWeights
from omni_flow.compute.sglang.wire import Inlet, Ready, Refused
from omni_flow.data.arena import Arena
from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.errors import DataError
from omni_flow.data.identity import Namespace
from omni_flow.data.posting_client import PostingClient
from omni_flow.models.families import family_of

SHAPING: Final = ("attention_backend", "moe_runner_backend", "quantization", "dtype")
"""Arguments of SGLang that decide what weights look like once they are loaded."""
KV_SHAPING: Final = ("json_model_override_args", "kv_cache_dtype", "quantization")
"""Arguments of SGLang that decide what KV a token has, beside the checkpoint and the dtype."""
SPIN_S: Final = 0.0005
"""How long a call of the memory manager looks for its answer before it sleeps, in an engine that stays awake."""


def namespace_of(config: EngineConfig) -> Namespace:
    """Identity of what the engine computes: engines of equal namespace share pages."""
    model = read_config(config.model)
    revision = config.revision
    if not revision:
        # random weights differ from start to start
        revision = f"dummy {uuid.uuid4()}" if config.load_format == "dummy" else checkpoint_revision(config.model)
    shaping = {name: config.extra[name] for name in KV_SHAPING if config.extra.get(name) is not None}
    if shaping:
        revision += " " + msgspec.json.encode(shaping, order="deterministic").decode()
    return Namespace(
        model=str(model.get("model_type")),
        revision=revision,
        weight_version=config.weight_version,
        dtype=config.dtype,
        page_size=config.page_size,
        attention_layout=kv_layout(model).name,
    )


def _takeover(config: EngineConfig, arguments: dict[str, Any]) -> takeover.Takeover:
    quota = config.max_tokens // config.page_size
    cpu = config.device == "cpu"
    if not config.manager:
        source = LocalPages(quota)
        return takeover.Takeover(PageBook(source), config.page_size, namespace_of(config), cpu)
    client = PostingClient(
        config.manager,
        name=f"engine {os.getpid()}",
        role="engine",
        quotas={config.pool: quota + LOT},
        spin=SPIN_S if config.awake_s else 0.0,
    )
    info = next((info for info in client.welcome.pools if info.name == config.pool), None)
    if info is None:
        there = ", ".join(pool.name for pool in client.welcome.pools)
        raise BadRequest(f"no pool {config.pool!r} at {config.manager}", f"there are: {there}")
    if (info.l1_device >= 0) == cpu:
        where = f"device {info.l1_device}" if info.l1_device >= 0 else "the CPU"
        raise BadRequest(f"the pool's L1 lies on {where}, the engine runs on {config.device}", "make the pool there")
    arena: Arena | DeviceArena
    if cpu:
        arena = client.arena(f"{config.pool}/l1", write=True)
    else:
        arena = client.device_arena(f"{config.pool}/l1", write=True)
    nbytes = info.l1_pages * info.page_bytes

    def view() -> Any:
        import torch

        return arena.torch(0, (nbytes,), torch.uint8)

    loader = None
    if info.l2_pages or info.l3:
        loader = Loader(PostingClient(config.manager, name=f"loader of engine {os.getpid()}"), config.pool)
    namespace = namespace_of(config)
    weights = None
    if config.share_weights and (config.revision or config.load_format != "dummy"):
        layout = [f"{name}={value}" for name, value in sorted(arguments.items()) if name in SHAPING]
        weights = SharedWeights(client, namespace, [plugin.VERSION, config.device, *layout], info.l1_device)
    book = PageBook(PoolPages(client, config.pool, quota))
    return takeover.Takeover(
        book,
        config.page_size,
        namespace,
        cpu,
        view,
        info.l1_pages,
        pool_page_bytes=info.page_bytes,
        loader=loader,
        keeper=Keeper(book, client, config.pool, config.page_size, config.session_ttl) if config.session_ttl else None,
        weights=weights,
    )


def device_fence(scheduler: Any) -> Fence:
    """Marks what the scheduler has launched so far by an event on the stream its forwards run on."""
    import torch

    stream = getattr(scheduler, "forward_stream", None)

    def mark() -> Callable[[], bool]:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream if stream is not None else torch.cuda.current_stream())
        passed: Callable[[], bool] = event.query
        return passed

    return mark


def start(config: EngineConfig, inlet: Inlet) -> Any:
    """Load the model and make the scheduler, everything verified.

    Raises:
        ComputeError: names what is missing or wrong.
    """
    model = read_config(config.model)
    family = family_of(model)
    quantised = "quantization_config" in model  # other tensors, of other types
    if family.tensors is not None and config.load_format != "dummy" and not quantised:
        check_tensors(config.model, family.tensors(model), family.unread)
    if config.threads:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
    # SGLang would wrap what it hands over for a socket; here nothing leaves the process.
    os.environ["SGLANG_USE_PICKLE_IPC"] = "1"
    if config.device == "cpu":
        from omni_flow.compute.sglang.shim import prepare_cpu

        prepare_cpu()
    # plugins that somebody named stay; without a list SGLang would load every plugin there is
    os.environ["SGLANG_PLUGINS"] = ",".join(filter(None, (os.environ.get("SGLANG_PLUGINS"), "omni_flow")))
    import torch
    from sglang.srt.plugins import load_plugins

    if config.threads:
        torch.set_num_threads(config.threads)
    arguments = server_arguments(config)
    mine = _takeover(config, arguments)
    mine.rule = family.rule
    mine.awake = config.awake_s
    mine.tail_graph = config.tail_graph and arguments.get("attention_backend") == TRITON
    mine.step_hook = config.step_hook
    takeover.install(mine)
    plugin.check_versions()
    load_plugins()
    plugin.verify_hooks()
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from omni_flow.compute.sglang.fixed_rows import FixedRows
    from omni_flow.compute.sglang.scheduler import scheduler_class

    server = ServerArgs(**arguments)
    _set_envs_and_config(server)
    publish(server, role="scheduler")
    kind: Any = scheduler_class()
    kind.inlet = inlet
    ports = PortArgs.init_new(server)
    for name in vars(ports).values():
        if isinstance(name, str) and name.startswith("ipc://"):  # a file each, for sockets that are never made
            Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
    scheduler = kind(server, ports, 0, 0, 0, 0, 0, 0, None)
    plugin.verify(scheduler)
    # SGLang's watchdog would end the parent, which is the role, or whoever runs the engine.
    scheduler.watchdog.parent_process = SimpleNamespace(send_signal=lambda _: os.kill(os.getpid(), signal.SIGKILL))
    mine.fixed = FixedRows(scheduler, graph=config.device == "cuda" and config.rows_graph)
    for rows in config.rows_at_start:
        mine.fixed.forward.prepare(rows)
    if config.device == "cuda":
        mine.book.fence = device_fence(scheduler)
        torch.cuda.empty_cache()  # what loading and capturing needed for a while; other engines share the device
    gc.collect()
    gc.freeze()  # a collection in mid-decode need not walk what imports and loading made
    return scheduler


class _Warnings(logging.Handler):
    """Keeps the lines of warnings: nobody reads what an engine process that lives has written."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        print(self.lines[-1], file=sys.stderr)


def serve(inlet: Inlet, config: EngineConfig) -> int:
    """Run until the socket ends. Returns the exit status."""
    warnings, ours = _Warnings(), logging.getLogger("omni_flow")
    ours.addHandler(warnings)
    try:
        scheduler = start(config, inlet)
    except (ComputeError, DataError) as error:
        inlet.send(Refused(0, type(error).__name__, error.message, error.mend))
        return 1
    finally:
        ours.removeHandler(warnings)
    model, size = scheduler.model_config, scheduler.page_size
    quota = scheduler.max_total_num_tokens
    # SGLang refuses the longer of the first kind. Those of the second it would take and never run: it plans with a page
    # for the answer, and one for its last.
    longest = min(scheduler.max_req_input_len - 1, quota - 2 * size)
    has_tokenizer = scheduler.tokenizer is not None
    inlet.send(Ready(quota, longest, model.vocab_size, model.hidden_size, size, has_tokenizer, warnings.lines))
    scheduler.run_event_loop()
    return 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock, rows, config = sys.argv[1:]
    inlet = Inlet(socket.socket(fileno=int(sock)), int(rows))
    status = serve(inlet, msgspec.json.decode(config, type=EngineConfig))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
