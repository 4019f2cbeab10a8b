"""``dormouse serve``: every setting as an option, the rest remembered from the last start."""

import ipaddress
import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dormouse import logs
from dormouse.calibration import ensure, this_machine
from dormouse.config import configure, missing_code, save
from dormouse.serving import Doors, run, serve

IN_MEMORY_ONLY = (
    "images live in memory only: functions deployed now are forgotten when the server ends, runtime state is not kept, "
    "nothing can be unloaded, and a deploy that finds host memory full is refused (images = dram)"
)
_LOG = logging.getLogger("dormouse.cli")
HOME = Path.home() / ".dormouse"


def serve_command(
    *,
    config: Annotated[Path | None, typer.Option("--config", help="Settings in TOML.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Forget the settings of the last start.")] = False,
    state_dir: Annotated[
        Path, typer.Option(help="What survives a restart. [default: ~/.dormouse]", show_default=False)
    ] = HOME,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0 picks a free one. [default: 8000]")] = None,
    grpc_port: Annotated[
        str | None,
        typer.Option(metavar="PORT", help="0 picks a free one, off: no gRPC. [default: 8001, or any if --port is 0]"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or several. [default: auto]")] = None,
    device_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Device memory for images, or auto.")] = None,
    chunk_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Piece of device memory, or auto.")] = None,
    group_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Smallest copy, or auto.")] = None,
    link_bytes_per_s: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Slow the CPU device's copies down to this, or auto.")
    ] = None,
    host_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory. [default: 4GiB]")] = None,
    request_slab_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Inputs in flight. [default: 256MiB]")
    ] = None,
    reply_slab_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Outputs in flight. [default: 256MiB]")
    ] = None,
    body_limit_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest request body. [default: 64MiB]")
    ] = None,
    auth: Annotated[
        bool | None,
        typer.Option(
            "--auth/--no-auth",
            help="Ask for keys, or let everybody in; for this start. [default: if there are keys, or not on loopback]",
            show_default=False,
        ),
    ] = None,
    tenants: Annotated[Path | None, typer.Option(help="Tenants with their keys and limits, in TOML, or off.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate in PEM: HTTP and gRPC over TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key in PEM.")] = None,
    head_timeout_s: Annotated[
        float | None, typer.Option(help="How long a request's head may take to arrive. [default: 20]")
    ] = None,
    body_timeout_s: Annotated[float | None, typer.Option(help="How long its body may take. [default: 120]")] = None,
    connections: Annotated[
        int | None, typer.Option(help="Connections open at once, at each door. [default: 4000]")
    ] = None,
    image_pixels: Annotated[
        int | None, typer.Option(help="Pixels of the largest picture that is decoded. [default: 32000000]")
    ] = None,
    queue_length: Annotated[int | None, typer.Option(help="Requests waiting in all. [default: 10000]")] = None,
    allow_code: Annotated[
        list[Path] | None, typer.Option(help="Directory from which functions may import code; repeatable.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Torch threads of the CPU device; 0: by the cores.")] = None,
    graphs: Annotated[str | None, typer.Option(help="CUDA graphs: auto or off. [default: auto]")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Order of work, places and evictions: dormouse, torpor, edf or fifo. [default: dormouse]"),
    ] = None,
    shed: Annotated[
        str | None,
        typer.Option(help="Refuse what still waits at its deadline: late; or answer late: off. [default: off]"),
    ] = None,
    routes: Annotated[
        str | None, typer.Option(help="Ways to a device: host, peer or auto (all). [default: auto]")
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option(help="Measure GPU links at the first start: auto or off. [default: auto]")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="disk, or dram: in host memory only, and lost with the server. [default: disk]")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="Lines on standard error: text or json. [default: text]")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="From here on: debug, info, warning, error. [default: info]")
    ] = None,
    log_requests: Annotated[
        bool | None,
        typer.Option(
            "--log-requests/--no-log-requests",
            help="A line for every request, not only for refused, failed and slow ones. [default: no]",
            show_default=False,
        ),
    ] = None,
    log_slow_ms: Annotated[float | None, typer.Option(help="From here on a request is slow. [default: 1000]")] = None,
    ledger: Annotated[
        str | None, typer.Option(help="Record what bills are made from: on or off. [default: on]")
    ] = None,
    ledger_sync: Annotated[
        str | None, typer.Option(help="What an entry survives: process (its end) or power. [default: process]")
    ] = None,
    tariff: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prices from now on, in TOML. [default: as they are]")
    ] = None,
    journal: Annotated[
        str | None, typer.Option(metavar="PATH", help="Record every decision here; off: nowhere. [default: off]")
    ] = None,
    poison: Annotated[bool | None, typer.Option("--poison", help="Fill freed device memory with garbage.")] = None,
    faults: Annotated[list[str] | None, typer.Option("--fault", help="Inject a fault; repeatable.")] = None,
) -> None:
    """Serve the functions deployed here. Settings are remembered: without options, as last time."""
    options = {key: value for key, value in locals().items() if key not in ("config", "reset", "state_dir")}
    given = {key: value for key, value in options.items() if value is not None and value != []}
    settings = configure(state_dir, given, config, reset=reset)
    logs.begin(settings.log_format, settings.log_level)
    if settings.auth is False and not _is_loopback(settings.host):
        typer.echo(f"warning: whoever reaches {settings.host} can deploy and remove functions (--no-auth)", err=True)
    if settings.images == "dram":
        typer.echo(f"warning: {IN_MEMORY_ONLY}", err=True)
    for directory in missing_code(settings):
        _LOG.warning("allow_code = '%s' is no directory any more: functions from it are refused", directory)

    if settings.calibrate == "auto" and not settings.device.startswith("cpu"):
        ensure(settings.state_dir, this_machine(), partial(typer.echo, err=True))

    def announce(doors: Doors) -> None:
        save(settings)  # now that they have proved of use, and no other server has the state directory
        scheme = "grpc" if settings.tls_cert is None else "grpcs"
        grpc = "" if doors.grpc is None else f" and {scheme}://{doors.grpc}"
        typer.echo(f"dormouse is ready on {doors.http}{grpc} (state in {settings.state_dir})")

    run(serve(settings, on_ready=announce))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
