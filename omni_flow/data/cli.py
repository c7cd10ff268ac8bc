"""`omni-flow memory …`: serve, inspect, top, check, bench."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.device_memory import Sharing
from omni_flow.data.errors import BadArgument, DataError
from omni_flow.data.launch import default_services, load_config
from omni_flow.data.logs import log_to_stderr
from omni_flow.data.overview_tables import plain, tables
from omni_flow.data.policy import PolicyError
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server import serve
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.ssd import BadSsdConfig
from omni_flow.data.ssd.directory import make_usable
from omni_flow.data.temp_client import TempClient
from omni_flow.data.tiers import movers_of, ssd_mover, with_l3
from omni_flow.data.transfer.node_config import NodeConfig
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.names import Family

memory_app = typer.Typer(
    help="The memory manager of this node: KV pages, temporary tensors, weights.", no_args_is_help=True
)


def default_path() -> str:
    """Socket of this user's memory manager: below XDG_RUNTIME_DIR, else below the home directory."""
    base = os.environ.get("XDG_RUNTIME_DIR") or str(Path.home() / ".cache")
    return str(Path(base) / "omni-flow" / "memory.sock")


class LogLevel(Enum):
    """What a log may leave out."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


Address = Annotated[str, typer.Option("--address", "-a", help="Socket path or ZMQ endpoint of the memory manager.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def parse_size(text: str) -> int:
    """Bytes of `64K`, `512M`, `4G` or a plain number."""
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    last = text[-1:].upper()
    try:
        return int(float(text[:-1]) * (1 << units[last])) if last in units else int(text)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text!r} is no size; write for example 512M") from error


def parse_sharing(text: str) -> Sharing:
    """How memory of devices is shared, see `ServerConfig.device_memory`."""
    try:
        sharing: Sharing = msgspec.convert(text, Sharing)
        return sharing
    except msgspec.ValidationError as error:
        raise typer.BadParameter(f"{text!r} is none of auto, vmm, ipc") from error


def parse_pool(text: str) -> PoolSpec:
    """A pool from `name=kv,page=2M,l1=1024,l2=4096,l3=0`; `device=0,planes=27` puts its L1 on a GPU, layer-major."""
    try:
        parts = dict(item.split("=", 1) for item in text.split(","))
        spec = PoolSpec(
            name=parts.pop("name"),
            page_bytes=parse_size(parts.pop("page")),
            l1_pages=int(parts.pop("l1")),
            l2_pages=int(parts.pop("l2", "0")),
            l3_pages=int(parts.pop("l3", "0")),
            l1_device=int(parts.pop("device", "-1")),
            planes=int(parts.pop("planes", "1")),
            padding=int(parts.pop("padding", "0")),
            policy=parts.pop("policy", "s3fifo"),
        )
        if parts:
            raise ValueError(f"unknown: {', '.join(parts)}")
        return spec
    except (KeyError, ValueError, TypeError, BadArgument) as error:
        raise typer.BadParameter(
            f"{text!r}: {error}; write name=kv,page=2M,l1=1024[,l2=…,l3=…,policy=lru,device=0,planes=…,padding=…]"
        ) from error


def ssd_tier(specs: Sequence[PoolSpec], directory: str, size: str) -> tuple[tuple[PoolSpec, ...], tuple[str, ...]]:
    """The pools with an L3, and the mover that keeps it. Raises: BadSsdConfig, the directory can't be used."""
    if not directory or not size:
        raise typer.BadParameter("an SSD tier needs a directory and a size: --ssd DIR --ssd-bytes 200G")
    cap = parse_size(size)
    try:
        full = with_l3(specs, directory, cap)
    except BadSsdConfig as error:
        raise typer.BadParameter(f"--ssd-bytes {size}: {error}") from error
    make_usable(Path(directory))
    return full, ssd_mover(directory, cap)


def transfer_process(name: str, control: str, peers: Sequence[str], key_file: str) -> tuple[str, ...]:
    """The command line of a node's transfer process. Raises: DataError, what would end it at once."""
    if not name:
        raise typer.BadParameter("--control, --peers and --key-file belong to a node: give it a --node NAME")
    config = NodeConfig(
        manager="{path}",
        name=name,
        listen=control,
        peers=tuple(peer for text in peers for peer in text.split(",") if peer),
        key_file=key_file,
    )
    config.check()
    return ("{python}", "-m", "omni_flow.data.transfer.node", msgspec.json.encode(config).decode())


def _end(error: Exception) -> typer.Exit:
    """Say what is wrong in one line; the command ends."""
    Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
    return typer.Exit(1)


@contextmanager
def _client(address: str, name: str = "cli", role: str = "viewer") -> Iterator[MemoryManagerClient]:
    """A session for as long as a command needs one, whatever becomes of the manager meanwhile."""
    try:
        with MemoryManagerClient(address or default_path(), name=name, role=role) as client:
            yield client
    except DataError as error:
        raise _end(error) from error


@memory_app.command("serve")
def serve_command(
    config: Annotated[Path | None, typer.Option(help="Config file (JSON); options below then don't apply.")] = None,
    path: Annotated[str, typer.Option(help="Path of the socket; its directory must be yours alone.")] = "",
    pool: Annotated[list[str] | None, typer.Option(help="KV pool, e.g. name=kv,page=2M,l1=1024,l2=4096.")] = None,
    temp: Annotated[str, typer.Option(help="Size of the TempBuffer arena.")] = "256M",
    endpoint: Annotated[list[str] | None, typer.Option(help="Further ZMQ endpoint.")] = None,
    populate: Annotated[str, typer.Option(help="now, background or lazy.")] = "now",
    device_memory: Annotated[str, typer.Option(help="How memory of GPUs is shared: auto, vmm or ipc.")] = "auto",
    ssd: Annotated[str, typer.Option(help="Directory of the SSD tier (L3) of pools with an L2.")] = "",
    ssd_bytes: Annotated[str, typer.Option(help="Most bytes on the SSD, e.g. 200G.")] = "",
    node: Annotated[str, typer.Option(help="Name among other nodes; runs the transfer process.")] = "",
    control: Annotated[str, typer.Option(help="Where this node listens for others.")] = "tcp://127.0.0.1:*",
    peers: Annotated[list[str] | None, typer.Option(help="Endpoints of other nodes; one that lives will do.")] = None,
    key_file: Annotated[str, typer.Option(help="File with the secret of all nodes; needed beyond loopback.")] = "",
    metrics_port: Annotated[
        int, typer.Option(help="Serve Prometheus metrics on this loopback port; 0: don't.", min=0, max=65535)
    ] = 0,
    log_level: Annotated[
        LogLevel, typer.Option(case_sensitive=False, help="Level of the JSON log on stderr.")
    ] = LogLevel.INFO,
) -> None:
    """Run the memory manager in the foreground until SIGTERM or Ctrl-C."""
    log_to_stderr(log_level.value)
    try:
        if config is not None:
            settings = load_config(str(config))
        else:
            specs = tuple(parse_pool(text) for text in pool or ())
            movers = movers_of(specs)
            if ssd or ssd_bytes:
                specs, keeper = ssd_tier(specs, ssd, ssd_bytes)
                movers += (keeper,)
            if node or peers or key_file:
                movers += (transfer_process(node, control, peers or (), key_file),)
            settings = ServerConfig(
                path=path or default_path(),
                node=node,
                pools=specs,
                temp_bytes=parse_size(temp),
                endpoints=tuple(endpoint or ()),
                populate=populate,
                device_memory=parse_sharing(device_memory),
                movers=movers,
            )
        if metrics_port:
            exporter = ("{python}", "-m", "omni_flow.data.metrics", "{path}", str(metrics_port))
            settings = msgspec.structs.replace(settings, movers=(*settings.movers, exporter))
        serve(settings, default_services)
    except (DataError, PolicyError) as error:
        raise _end(error) from error


@memory_app.command()
def inspect(
    address: Address = "",
    as_json: AsJson = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Name each tensor of the weights, too.")] = False,
) -> None:
    """Who is connected and what each holds; pages, TempBuffers, weights, jobs under way. Names and content of pages are
    never shown."""
    with _client(address) as client:
        seen: dict[str, Any] = {"sessions": client.inspect(), **client.overview()}
        if tensors:
            versions = {(row["model"], row["revision"], row["version"]) for row in seen["weights"]}
            seen["tensors"] = [
                {
                    "tensor": entry.spec.name.path,
                    "shard": f"{entry.spec.name.shard_index}/{entry.spec.name.shard_count}",
                    "dtype": entry.spec.name.dtype,
                    "shape": list(entry.spec.shape),
                    "bytes": entry.spec.nbytes,
                    "model": model,
                    "version": version,
                    "device": entry.device,
                }
                for model, revision, version in sorted(versions)
                for entry in WeightClient(client).manifest(Family(model, revision), version)
            ]
    if as_json:
        print(json.dumps(seen))
        return
    for table in tables(seen):
        Console().print(table)


def _top_table(now: dict[str, int | float], before: dict[str, int | float], seconds: float) -> Table:
    table = Table("figure", "now", "per second", title="memory manager")
    for name, value in sorted(now.items()):
        rate = (value - before.get(name, value)) / seconds if seconds else 0.0
        if value or rate:
            table.add_row(plain(name), f"{value:,}", f"{rate:,.0f}" if rate else "")
    return table


@memory_app.command()
def top(
    address: Address = "",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="How many looks; 0: until Ctrl-C.")] = 0,
    as_json: AsJson = False,
) -> None:
    """All figures of the memory manager, live."""
    with _client(address) as client:
        before = client.stats()
        if as_json:
            print(json.dumps(before))
            return
        with Live(_top_table(before, before, 0.0), refresh_per_second=4) as live:
            done = 1
            while not rounds or done < rounds:
                client.wait_end(interval)
                now = client.stats()
                live.update(_top_table(now, before, interval))
                before = now
                done += 1


@memory_app.command()
def check(address: Address = "", as_json: AsJson = False) -> None:
    """Check the invariants of all tables; exit code 1 if one is violated."""
    with _client(address) as client:
        faults = client.check()
    if as_json:
        print(json.dumps(faults))
    else:
        Console().print("\n".join(faults) or "sound", markup=False)
    raise typer.Exit(1 if faults else 0)


@memory_app.command()
def bench(address: Address = "", as_json: AsJson = False) -> None:
    """A quick look at the speed of a running memory manager (µs, medians). `bench/data_plane.py` measures properly."""

    def median_us(action: object, times: int = 2000) -> float:
        assert callable(action)
        spent = []
        for _ in range(times):
            began = time.perf_counter()
            action()
            spent.append(time.perf_counter() - began)
        return round(statistics.median(spent) * 1e6, 2)

    with _client(address, "bench", "client") as client:
        figures = {"ping_us": median_us(client.ping)}
        if client.welcome.pools:
            name = client.welcome.pools[0].name
            keys = np.frombuffer(os.urandom(32 * 512), np.uint8).reshape(-1, 32)
            figures["probe_one_us"] = median_us(lambda: client.probe(name, keys[:1]))
            figures["probe_512_us"] = median_us(lambda: client.probe(name, keys), 300)
        if client.welcome.temp_bytes:
            temp = TempClient(client)

            def cycle() -> None:
                buffer = temp.alloc(4096)
                temp.adopt(temp.publish(buffer, "uint8", (4096,))).release()

            figures["temp_cycle_us"] = median_us(cycle)
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("figure", "median")
    for name, value in figures.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(memory_app())
