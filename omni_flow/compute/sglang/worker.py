"""The engine process: `python -m omni_flow.compute.sglang.worker FD CONFIG`. One model, SGLang's scheduler, one socket.

It ends when the socket does, so it never outlives its role.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

import msgspec

from omni_flow.compute.errors import ComputeError
from omni_flow.compute.sglang import takeover
from omni_flow.compute.sglang.config import EngineConfig, server_arguments
from omni_flow.compute.sglang.pages import PageBook
from omni_flow.compute.sglang.pagesource import LocalPages
from omni_flow.compute.sglang.wire import Inlet, Ready, Refused
from omni_flow.data.identity import Namespace


def namespace_of(config: EngineConfig) -> Namespace:
    """Identity of what the engine computes: engines of equal namespace share pages."""
    return Namespace(
        model=os.path.basename(os.path.normpath(config.model)),
        revision=config.revision,
        weight_version=config.weight_version,
        dtype=config.dtype,
        page_size=config.page_size,
        attention_layout="layer-major",
    )


def _takeover(config: EngineConfig) -> takeover.Takeover:
    source = LocalPages(config.max_tokens // config.page_size)
    return takeover.Takeover(PageBook(source), config.page_size, namespace_of(config), cpu=config.device == "cpu")


def start(config: EngineConfig, inlet: Inlet) -> Any:
    """Load the model and make the scheduler, everything verified.

    Raises:
        ComputeError: names what is missing or wrong.
    """
    if config.threads:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
    # SGLang would wrap what it hands over for a socket; here nothing leaves the process.
    os.environ["SGLANG_USE_PICKLE_IPC"] = "1"
    if config.device == "cpu":
        from omni_flow.compute.sglang.shim import prepare_cpu

        prepare_cpu()
    os.environ["SGLANG_PLUGINS"] = "omni_flow"
    import torch
    from sglang.srt.plugins import load_plugins

    from omni_flow.compute.sglang import plugin

    if config.threads:
        torch.set_num_threads(config.threads)
    takeover.install(_takeover(config))
    load_plugins()
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from omni_flow.compute.sglang.scheduler import scheduler_class

    arguments = ServerArgs(**server_arguments(config))
    _set_envs_and_config(arguments)
    publish(arguments, role="scheduler")
    kind: Any = scheduler_class()
    kind.inlet = inlet
    scheduler = kind(arguments, PortArgs.init_new(arguments), 0, 0, 0, 0, 0, 0, None)
    plugin.verify(scheduler)
    return scheduler


def serve(fd: int, config: EngineConfig) -> int:
    """Run until the socket ends. Returns the exit status."""
    inlet = Inlet(socket.socket(fileno=fd))
    try:
        scheduler = start(config, inlet)
    except ComputeError as error:
        inlet.send(Refused(0, type(error).__name__, error.message, error.mend))
        return 1
    model = scheduler.model_config
    inlet.send(
        Ready(
            scheduler.max_total_num_tokens,
            scheduler.max_req_input_len,
            model.vocab_size,
            model.hidden_size,
            scheduler.page_size,
        )
    )
    scheduler.run_event_loop()
    return 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(sys.argv[2], type=EngineConfig)
    status = serve(int(sys.argv[1]), config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
