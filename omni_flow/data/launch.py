"""Starting a memory manager: the services of a node, and a process that runs them.

`python -m omni_flow.data.launch CONFIG.json [--ready-fd N]` serves until SIGTERM. It writes one line to descriptor N
once clients may connect; the launcher waits for that instead of trying.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from omni_flow.data.children import Children
from omni_flow.data.errors import DataError, Disconnected
from omni_flow.data.job_service import JobService
from omni_flow.data.kv_service import KvService
from omni_flow.data.server import Server, ServerConfig, serve
from omni_flow.data.session import Service
from omni_flow.data.temp_service import TempService
from omni_flow.data.weights.service import WeightService


def default_services(server: Server) -> Sequence[Service]:
    """The services of a node: KV pools, their movers, TempBuffers, weights."""
    config = server.config
    kv = KvService(config.pools)
    services: list[Service] = [kv, JobService(kv, config.prefetch_bytes)]
    if config.temp_bytes:
        temp = TempService(config.temp_bytes, config.temp_large_bytes, config.temp_client_bytes, config.orphan_s)
        server.arena_of["temp/ledger"] = temp.ledger
        server.arena_of["temp/generations"] = temp.generations
        server.own_arenas.add("temp/ledger")
        server.read_only_arenas.add("temp/generations")
        services.append(temp)
    services.append(WeightService(server.arena_of, config.weight_linger_s, time.monotonic))
    if config.movers:
        children = Children(server, config.movers)
        server.on_stop.append(children.stop)
        services.append(children)
    return services


def load_config(path: str) -> ServerConfig:
    """Read a config file in JSON.

    Raises:
        DataError: not a config; the message says where.
    """
    with open(path, "rb") as file:
        raw = file.read()
    try:
        return msgspec.json.decode(raw, type=ServerConfig)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: {error}", "see ServerConfig") from error


def start(config: ServerConfig, *, timeout: float = 120.0) -> subprocess.Popen[bytes]:
    """Start a memory manager in a process of its own and return when clients may connect.

    The process is in a session of its own: it outlives neither its arenas' users nor their process groups' signals.

    Raises:
        Disconnected: it ended before it was ready; its error output stands in the message.
    """
    read, write = os.pipe()
    encoded = msgspec.json.encode(config).decode()
    command = [sys.executable, "-m", "omni_flow.data.launch", encoded, "--ready-fd", str(write)]
    process = subprocess.Popen(command, pass_fds=(write,), start_new_session=True, stderr=subprocess.PIPE)
    os.close(write)
    try:
        with open(read, "rb") as ready:
            line = ready.readline()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if not line:
        _, output = process.communicate(timeout=timeout)
        raise Disconnected(f"the memory manager ended with {process.returncode}: {output.decode()[-2000:]}")
    return process


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the server process."""
    parser = argparse.ArgumentParser(prog="omni-flow-memory")
    parser.add_argument("config", help="path of a config file, or the config itself as JSON")
    parser.add_argument("--ready-fd", type=int, default=-1)
    options = parser.parse_args(argv)
    if options.config.lstrip().startswith("{"):
        config = msgspec.json.decode(options.config, type=ServerConfig)
    else:
        config = load_config(options.config)

    def ready(server: Server) -> None:
        if options.ready_fd >= 0:
            os.write(options.ready_fd, f"{server.epoch}\n".encode())
            os.close(options.ready_fd)

    serve(config, default_services, ready)


if __name__ == "__main__":
    main()
