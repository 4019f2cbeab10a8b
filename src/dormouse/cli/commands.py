"""The commands. Each asks a server one thing and prints the answer; failures are one line and an exit status.

Exit status: 0 done, 1 failed, 2 bad input.
"""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from typer.core import TyperGroup

from dormouse import __version__
from dormouse.cli.billing import bill, ledger_app, tariff_app
from dormouse.cli.calibrate import calibrate_command
from dormouse.cli.client import DEFAULT_SERVER, Refused, Server
from dormouse.cli.keys import keys
from dormouse.cli.load import load
from dormouse.cli.manifests import Changes, manifest_of
from dormouse.cli.simulate import replay, simulate
from dormouse.cli.start import serve_command
from dormouse.cli.tables import eager_lines, functions_table, node_lines, size
from dormouse.cli.tensors import described, parse_input, request_of, text_input
from dormouse.cli.top import top
from dormouse.core.types import Pin
from dormouse.errors import ConfigurationFault, DormouseError, InvalidRequest

FAILED, BAD_INPUT = 1, 2
FORBIDDEN = 403
_BAD_INPUT_STATUSES = (400, 413)

ServerOption = Annotated[str, typer.Option("--server", envvar="DORMOUSE_SERVER", help="Address of the server.")]
KeyOption = Annotated[
    str, typer.Option("--key", envvar="DORMOUSE_KEY", help="Key for it; in the variable, others cannot see it.")
]
CaOption = Annotated[
    Path | None, typer.Option("--ca", envvar="DORMOUSE_CA", help="Certificates in PEM to trust, for https.")
]
Name = Annotated[str, typer.Argument(help="A deployed function.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class _OneLine(TyperGroup):
    """Prints every failure as one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DormouseError as fault:
            typer.echo(f"error: {fault.message}", err=True)
            raise typer.Exit(BAD_INPUT if fault.status in _BAD_INPUT_STATUSES else FAILED) from None


app = typer.Typer(
    cls=_OneLine,
    help="Serverless GPU inference for many models on few GPUs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve_command)
app.add_typer(keys, name="keys")
app.command("calibrate")(calibrate_command)
app.command()(load)
app.command()(top)
app.command()(simulate)
app.command()(replay)
app.command()(bill)
app.add_typer(tariff_app, name="tariff")
app.add_typer(ledger_app, name="ledger")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except Exception as fault:  # a bug: whatever may go wrong is a DormouseError
        typer.echo(f"error: internal error, please report it: {type(fault).__name__}: {fault}", err=True)
        sys.exit(FAILED)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def deploy(
    source: Annotated[
        str, typer.Argument(help="A model's directory, a .pt2 file, module:callable, or a manifest.toml.")
    ],
    *,
    name: Annotated[str | None, typer.Option(help="What it is called. [default: from the source]")] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast weights: float32, float16 or bfloat16.")] = None,
    task: Annotated[str | None, typer.Option(help="What a Hugging Face model is for. [default: auto]")] = None,
    pin: Annotated[Pin | None, typer.Option(help="The tier it never falls below.")] = None,
    slo_ms: Annotated[float | None, typer.Option(help="Deadline of its SLO. [default: 1000]")] = None,
    percentile: Annotated[float | None, typer.Option(help="Share within the deadline. [default: 98]")] = None,
    timeout_ms: Annotated[float | None, typer.Option(help="When a request is given up. [default: 60000]")] = None,
    code: Annotated[Path | None, typer.Option(help="Directory that module:callable is imported from.")] = None,
    arg: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the callable; repeatable.")] = None,
    like: Annotated[
        str | None, typer.Option(metavar="NAME", help="A deployed function that differs in its weights only.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose it is. [default: that of the key]")] = None,
    public: Annotated[
        bool | None, typer.Option("--public/--private", help="Whether every tenant may see and call it.")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """Deploy a function, or a new version of one."""
    changes = Changes(name, dtype, task, pin, slo_ms, percentile, timeout_ms, code, arg or (), like, tenant, public)
    manifest = manifest_of(source, changes)
    with Server(server, key, ca) as remote:
        typer.echo(f"deployed {manifest.name} version {remote.deploy(manifest)}")


@app.command()
def check(
    manifest: Annotated[str, typer.Argument(help="What deploy would be given.")],
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """Say what a deploy would do, without doing it. Exit status 1 if it would be refused."""
    with Server(server, key, ca) as remote:
        answer = remote.check(manifest_of(manifest, Changes()))
    replaced = answer["replaces_version"]
    typer.echo(f"{answer['name']}: {'a new function' if replaced is None else f'replaces version {replaced}'}")
    typer.echo(f"  {size(answer['image_bytes'])}, {answer['platform']}")
    for kind in ("inputs", "outputs"):
        for tensor in answer[kind]:
            typer.echo(f"  {kind[:-1]} {tensor['name']}  {tensor['datatype']} {tensor['shape']}")
    if not answer["admitted"]:
        raise DormouseError(f"would be refused: {answer['refusal']}")
    typer.echo("  would be admitted")


@app.command("rm")
def remove(name: Name, server: ServerOption = DEFAULT_SERVER, key: KeyOption = "", ca: CaOption = None) -> None:
    """Remove a function and all that it keeps."""
    with Server(server, key, ca) as remote:
        remote.remove(name)
    typer.echo(f"removed {name}")


@app.command()
def unload(name: Name, server: ServerOption = DEFAULT_SERVER, key: KeyOption = "", ca: CaOption = None) -> None:
    """Free all memory that a function takes; it stays deployed."""
    with Server(server, key, ca) as remote:
        remote.unload(name)
    typer.echo(f"unloaded {name}")


@app.command("ps")
def list_functions(
    json: AsJson = False, server: ServerOption = DEFAULT_SERVER, key: KeyOption = "", ca: CaOption = None
) -> None:
    """List functions: where they are, what they weigh, how they are served."""
    with Server(server, key, ca) as remote:
        rows, node = remote.functions(), _node_of(remote)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"functions": rows, "node": node})).decode())
        return
    console = Console()
    # A pipe has no width; a table cut off there would be of no use to the next program.
    (console if console.is_terminal else Console(width=250)).print(functions_table(rows))
    for line in (*eager_lines(rows), *([] if node is None else node_lines(node))):
        typer.echo(line)


def _node_of(remote: Server) -> dict[str, Any] | None:
    """None for a tenant, who sees its functions only."""
    try:
        return remote.node()
    except Refused as fault:
        if fault.status == FORBIDDEN:
            return None
        raise


@app.command()
def call(
    name: Name,
    *,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="A whole V2 request; - is stdin.")] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=VALUE", help="An input, as JSON or a text; repeatable."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The one input of texts.")] = None,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = "",
    ca: CaOption = None,
) -> None:
    """Call a function and print what it answers."""
    if sum(option is not None for option in (json, given or None, text)) != 1:
        raise InvalidRequest("give the request as one of --json, --input or --text")
    with Server(server, key, ca) as remote:
        if json is not None:
            head, tails = _read(json), b""
        else:
            metadata = remote.metadata(name)
            values = dict(map(parse_input, given or ())) if text is None else text_input(text, metadata)
            head, tails = request_of(values, metadata)
        answer = remote.infer(name, head, tails)
    for line in described(*answer):
        typer.echo(line)


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as fault:
        raise ConfigurationFault(f"{file} cannot be read: {fault.strerror}") from None


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="How long it runs.")] = 30,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Many real models on one small device, every answer checked."""
    # Late: it brings torch and the models.
    status: int = importlib.import_module("dormouse.demo.run").run(seconds, device, json)
    raise typer.Exit(status)
