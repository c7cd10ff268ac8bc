"""`omni-flow serve`, `key`, `top` and `trace`. What they need of the extra is imported when they run."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
import uvloop

from omni_flow.cli import target
from omni_flow.cli.command import Debug, guarded, stderr
from omni_flow.cli.errors import ExitCode, UserError, did_you_mean
from omni_flow.cli.flags import read_replicas
from omni_flow.cli.target import Target
from omni_flow.cli.tiers import Ssd, SsdBytes, memory_options
from omni_flow.control.compiled import CompiledGraph

TargetsArgument = Annotated[
    list[str],
    typer.Argument(metavar="TARGET...", help="A folder with graph.py, a .py file, module:attr or an example."),
]
_LEVELS = ("debug", "info", "warning", "error")


def find_target(text: str) -> Target:
    """What `text` names, or the example of that name in the checkout. Raises UserError."""
    if "/" not in text and text.isidentifier() and not Path(text).exists():
        for root in (Path("examples"), Path(__file__).resolve().parents[2] / "examples"):
            if (root / text / "graph.py").is_file():
                return target.load(str(root / text))
    return target.load(text)


def endpoints_of(found: Target) -> tuple[Any, ...]:
    """`endpoints` of the graph's own module, else of `serving.py` in its folder; none if there is neither.

    Raises UserError.
    """
    from omni_flow.serve.endpoints import Endpoint

    file = Path(found.place.rpartition(":")[0])
    module: ModuleType | None = next((m for m in sys.modules.values() if _is_from(m, file)), None)
    if module is None or not hasattr(module, "endpoints"):
        beside = file.with_name("serving.py")
        if not beside.is_file():
            return ()
        module = _import_beside(beside)
    declared = getattr(module, "endpoints", None)
    listed = tuple(declared) if isinstance(declared, (list, tuple)) else (declared,)
    for each in listed:
        if not isinstance(each, Endpoint):
            raise UserError(
                f"{module.__file__}: endpoints holds a {type(each).__name__}",
                "it is a tuple of ChatCompletions(...), Speech(...) and the like of omni_flow.serve.endpoints",
            )
    return listed


def _is_from(module: ModuleType, file: Path) -> bool:
    own = getattr(module, "__file__", None)
    return isinstance(own, str) and own == str(file)


def _import_beside(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"serving_of_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    return module


@guarded
def serve(
    targets: TargetsArgument,
    host: Annotated[str, typer.Option("--host", help="Address to listen at; 0.0.0.0 is everybody's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    api_keys_file: Annotated[
        Path | None,
        typer.Option("--api-keys-file", metavar="FILE", help="Lines of `omni-flow key`; also OMNI_FLOW_API_KEYS."),
    ] = None,
    replicas: Annotated[
        list[str] | None, typer.Option("--replicas", metavar="ROLE=N", help="How many replicas of a role.")
    ] = None,
    ssd: Ssd = None,
    ssd_bytes: SsdBytes = None,
    max_requests: Annotated[int, typer.Option("--max-requests", min=1, help="Live requests of a graph.")] = 4096,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second of an API key.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Live requests of an API key.")] = None,
    max_body_mb: Annotated[int, typer.Option("--max-body-mb", min=1, help="MiB of a request's body.")] = 64,
    request_s: Annotated[float, typer.Option("--request-timeout", help="Seconds a request may take.")] = 600.0,
    drain_s: Annotated[float, typer.Option("--drain", help="Seconds for requests to end at a stop.")] = 10.0,
    allow_url: Annotated[
        list[str] | None,
        typer.Option("--allow-url-host", metavar="HOST", help="Fetch pictures and sound from there; *.HOST too."),
    ] = None,
    cors: Annotated[list[str] | None, typer.Option("--cors-origin", metavar="ORIGIN", help="Allow a web site.")] = None,
    log_level: Annotated[str, typer.Option("--log-level", help=", ".join(_LEVELS))] = "info",
    log_json: Annotated[bool, typer.Option("--log-json/--log-text", help="How log lines are written.")] = True,
    otel: Annotated[bool, typer.Option("--otel", help="Send spans where OTEL_EXPORTER_OTLP_ENDPOINT says.")] = False,
    one_process: Annotated[bool, typer.Option("--one-process", help="Run all roles in this process.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be served, and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Serve graphs over HTTP: as OpenAI's API where a graph says how, as they are under /v1/graphs, and a page at /."""
    from omni_flow.deploy.errors import LaunchError
    from omni_flow.serve.endpoints import MappingError
    from omni_flow.serve.keys import KeysError, load

    if log_level not in _LEVELS:
        raise UserError(f"--log-level {log_level}", f"there is {', '.join(_LEVELS)}")
    found = [find_target(text) for text in targets]
    graphs = [each.graph.compile() for each in found]
    endpoints = [endpoints_of(each) for each in found]
    try:
        keys = load(api_keys_file, os.environ)
        for compiled, stated in zip(graphs, endpoints, strict=True):
            for endpoint in stated:
                endpoint.check(compiled)
    except (KeysError, MappingError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{api_keys_file}: {error.strerror}", "make keys with `omni-flow key NAME`") from error
    counts = _for_graphs(graphs, replicas or [])
    memory = memory_options(ssd, ssd_bytes, one_process)
    settings = _settings(
        max_body_bytes=max_body_mb * 2**20,
        rate_per_s=rate,
        concurrency=concurrency,
        request_s=request_s,
        drain_s=drain_s,
        cors_origins=tuple(cors or ()),
        url_hosts=tuple(allow_url or ()),
    )
    out = stderr()
    if dry_run:
        for line in plan(graphs, endpoints, counts, len(keys), settings, f"http://{host}:{port}", max_requests):
            typer.echo(line)
        return
    server_module = _server_module()
    from omni_flow.control.runtime.gateway import Limits
    from omni_flow.serve.logs import set_up

    set_up(log_level, as_json=log_json)
    limits = Limits(max_requests=max_requests)
    serving = []
    for each, stated, count in zip(found, endpoints, counts, strict=True):
        options: dict[str, Any] = {"processes": not one_process, "replicas": count, "limits": limits, **memory}
        if not one_process:
            options |= {"target": each.place, "log_level": log_level.upper(), "on_event": _say}
        serving.append(server_module.Serving(each.graph, stated, options))
    try:
        server = server_module.Server(serving, settings, keys, host, port)
        spans = _tracing() if otel else None

        def ready(server: Any) -> None:
            if spans is not None:
                server.state.book.every_timeline = True
                server.state.book.on_end.append(spans)
            for line in plan(graphs, endpoints, counts, len(keys), settings, server.url, max_requests):
                out.print(line)
            out.print(f"ready at {server.url} (page: {server.url}/)")

        uvloop.run(server_module.serve_until_signal(server, ready))
    except LaunchError as error:
        raise UserError(str(error), code=ExitCode.FAILED) from error
    except OSError as error:
        raise UserError(f"{host}:{port}: {error.strerror}", "choose another --port") from error


def _server_module() -> Any:
    """Raises UserError without the extra."""
    try:
        from omni_flow.serve import server
    except ImportError as error:
        raise UserError(f"serving needs {error.name}", "pip install 'omni-flow[serve]'") from error
    return server


def _terminal() -> Any:
    """Raises UserError without the extra."""
    try:
        from omni_flow.serve import terminal
    except ImportError as error:
        raise UserError(f"this needs {error.name}", "pip install 'omni-flow[client]'") from error
    return terminal


def _tracing() -> Any:
    """Raises UserError without the extra."""
    try:
        from omni_flow.serve.tracing import exporter_tracing
    except ImportError as error:
        raise UserError(f"--otel needs {error.name}", "pip install 'omni-flow[otel]'") from error
    return exporter_tracing()


def _say(line: str) -> None:
    logging.getLogger("omni_flow.deploy").info("%s", line)


def _for_graphs(graphs: Sequence[CompiledGraph], given: Sequence[str]) -> list[dict[str, int]]:
    """How many replicas of which roles, for each graph. Raises UserError for a role that no graph has."""
    roles = {role for graph in graphs for role in graph.roles}
    for text in given:
        if text.partition("=")[0] not in roles:
            raise UserError(f"--replicas {text}: no such role", did_you_mean(text.partition("=")[0], roles))
    return [
        dict(read_replicas(graph, [text for text in given if text.partition("=")[0] in graph.roles]))
        for graph in graphs
    ]


def _settings(url_hosts: tuple[str, ...], **options: Any) -> Any:
    from omni_flow.serve.settings import MediaSettings, Settings

    return Settings(media=MediaSettings(url_hosts=url_hosts), **options)


def plan(
    graphs: Sequence[CompiledGraph],
    endpoints: Sequence[Sequence[Any]],
    counts: Sequence[Any],
    keys: int,
    settings: Any,
    url: str,
    max_requests: int,
) -> list[str]:
    """What is served, where and within which limits, a line each."""
    from omni_flow.serve.paths import paths_of

    lines = [f"at {url}"]
    for graph, stated, count in zip(graphs, endpoints, counts, strict=True):
        roles = ", ".join(f"{name} ×{count.get(name, role.replicas)}" for name, role in graph.roles.items())
        lines.append(f"graph {graph.name}: {roles}")
        lines.append(f"  POST /v1/graphs/{graph.name}/requests")
        for endpoint in stated:
            lines += [f"  {path}  model {endpoint.model or graph.name}" for path in paths_of(endpoint)]
    per_key = [
        f"{settings.rate_per_s:g}/s" if settings.rate_per_s else "",
        f"{settings.concurrency} at once" if settings.concurrency else "",
    ]
    lines.append(
        f"limits: {max_requests} live requests a graph, {settings.max_body_bytes >> 20} MiB a body, "
        f"{settings.request_s:g} s a request, {settings.max_connections} connections"
        + (f", a key {' and '.join(p for p in per_key if p)}" if any(per_key) else "")
    )
    media = settings.media
    lines.append(
        f"media: {media.max_bytes >> 20} MiB, {media.max_pixels / 1e6:g} megapixels, {media.max_seconds:g} s of sound; "
        f"fetched by URL from {', '.join(media.url_hosts) or 'nowhere'}"
    )
    lines.append(f"API keys: {keys}" if keys else "API keys: none, everybody who reaches this port may call")
    lines.append(f"at a stop: requests under way have {settings.drain_s:g} s to end")
    return lines


@guarded
def key(
    name: Annotated[str, typer.Argument(help="Who will use it.")],
    debug: Debug = False,
) -> None:
    """Make an API key: the key on stdout's first line, its line for the keys file on the second."""
    from omni_flow.serve.keys import KeysError, make_key

    try:
        secret, line = make_key(name)
    except KeysError as error:
        raise UserError(str(error)) from error
    typer.echo(secret)
    typer.echo(line)


UrlOption = Annotated[str, typer.Option("--url", help="Where the server answers.")]
KeyOption = Annotated[str | None, typer.Option("--key", envvar="OMNI_FLOW_API_KEY", help="An API key of it.")]
URL = "http://127.0.0.1:8000"


@guarded
def top(
    url: UrlOption = URL,
    api_key: KeyOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print one view and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Watch a server: roles, replicas, interfaces, edges and requests, once a second until ^C."""
    _terminal().top(url, api_key, once, as_json)


@guarded
def trace(
    request: Annotated[str | None, typer.Argument(help="A request's id; the last one's if left out.")] = None,
    url: UrlOption = URL,
    api_key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show what ran when in one request of a server, and where."""
    _terminal().trace(request, url, api_key, as_json)
