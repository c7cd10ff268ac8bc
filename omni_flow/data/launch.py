"""Starting a memory manager: the services of a node, and a process that runs them.

`python -m omni_flow.data.launch CONFIG.json [--ready-fd N]` serves until SIGTERM. It writes one line to descriptor N
once clients may connect; the launcher waits for that instead of trying.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from omni_flow.data.children import Children
from omni_flow.data.errors import BadArgument, DataError, Disconnected, run_process
from omni_flow.data.job_service import JobService
from omni_flow.data.kv_service import KvService
from omni_flow.data.logs import log_to_stderr
from omni_flow.data.server import Server, serve
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.session import Service
from omni_flow.data.session_service import SessionService
from omni_flow.data.temp_service import TempService
from omni_flow.data.transfer.service import DirectoryService
from omni_flow.data.weights.service import WeightService


def default_services(server: Server) -> Sequence[Service]:
    """The services of a node: KV pools, sessions' leases on them, their movers, TempBuffers, weights."""
    config, arenas = server.config, server.arenas
    kv = KvService(config.pools)
    jobs = JobService(kv, server, config.prefetch_bytes)
    services: list[Service] = [kv, SessionService(kv), jobs]
    if config.temp_bytes:
        temp = TempService(config.temp_bytes, config.temp_large_bytes, config.temp_client_bytes, config.orphan_s)
        arenas.made_by["temp/ledger"] = temp.ledger
        arenas.made_by["temp/slots"] = temp.slots
        arenas.own.add("temp/ledger")
        services.append(temp)
    services.append(DirectoryService(kv.pools))
    services.append(
        WeightService(
            arenas.made_by,
            arenas.read_only,
            server.devices.request,
            config.weight_linger_s,
            time.monotonic,
        )
    )
    if config.movers:
        children = Children(server, config.movers)
        server.on_stop.append(children.stop)
        jobs.end_process = children.kill
        jobs.is_restarted = children.runs
        jobs.expect(children.kinds)
        services.append(children)
    return services


def load_config(path: str) -> ServerConfig:
    """Read a config file in JSON.

    Raises:
        DataError: no file, or not a config; the message says where.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "name a file with a ServerConfig in JSON") from error
    return config_of(raw, path)


def config_of(raw: bytes, name: str) -> ServerConfig:
    """A config from JSON. Raises: DataError, not a config; the message says where, and which by its `name`."""
    try:
        return msgspec.json.decode(raw, type=ServerConfig)
    except (msgspec.MsgspecError, BadArgument) as error:
        raise DataError(f"{name}: {error}", "see ServerConfig") from error


def start(config: ServerConfig, *, log: str | None = None, life: int | None = None) -> subprocess.Popen[bytes]:
    """Start a memory manager in a process of its own and return when clients may connect.

    It is the leader of a new process session, so signals to this process's group don't reach it.

    Args:
        log: file to append its JSON log to; None: a file without a name, shown if it does not come up.
        life: read end of a pipe; the server ends when its last writer is gone, so that it never outlives its owner.

    Raises:
        Disconnected: it ended before it was ready; the end of its log stands in the message.
    """
    read, write = os.pipe()
    encoded = msgspec.json.encode(config).decode()
    command = [sys.executable, "-m", "omni_flow.data.launch", encoded, "--ready-fd", str(write)]
    fds = (write,) if life is None else (write, life)
    if life is not None:
        command += ["--life-fd", str(life)]
    with open(log, "ab+") if log else tempfile.TemporaryFile() as errors, open(read, "rb") as ready:
        try:
            process = subprocess.Popen(command, pass_fds=fds, start_new_session=True, stderr=errors)
        finally:
            os.close(write)
        if ready.readline():
            return process
        code = process.wait()
        errors.seek(0)
        raise Disconnected(f"the memory manager ended with {code}: {errors.read().decode()[-2000:]}")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the server process."""
    parser = argparse.ArgumentParser(prog="omni-flow-memory")
    parser.add_argument("config", help="path of a config file, or the config itself as JSON")
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--life-fd", type=int, default=-1)
    options = parser.parse_args(argv)
    if options.config.lstrip().startswith("{"):
        config = config_of(options.config.encode(), "config")
    else:
        config = load_config(options.config)

    def ready(server: Server) -> None:
        if options.ready_fd >= 0:
            os.write(options.ready_fd, f"{server.epoch}\n".encode())
            os.close(options.ready_fd)

    log_to_stderr()
    faulthandler.enable()
    if options.life_fd >= 0:
        threading.Thread(target=_end_with, args=(options.life_fd,), name="life", daemon=True).start()
    serve(config, default_services, ready)


def _end_with(life: int) -> None:
    """End this process as SIGTERM does once the pipe has no writer any more."""
    while os.read(life, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    run_process(main)
