"""``dormouse keys``: make, list and revoke the keys of a state directory, whether its server runs or not."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dormouse.cli.start import HOME
from dormouse.errors import ConfigurationFault
from dormouse.functions import NAME
from dormouse.tenants.keyfile import KeyFile, KeyRecord
from dormouse.tenants.keys import digest_of, new_key, shown

LONGEST_NAME = 200

StateDir = Annotated[
    Path, typer.Option(help="The server's state directory. [default: ~/.dormouse]", show_default=False)
]

keys = typer.Typer(help="Keys of callers: who they are, and what they may.", no_args_is_help=True)


@keys.command()
def create(
    *,
    tenant: Annotated[str, typer.Option(help="On whose account its owner asks.")] = "",
    admin: Annotated[bool, typer.Option("--admin", help="May deploy, load, unload, remove, and see all.")] = False,
    name: Annotated[str, typer.Option(help="What it is for, to tell it from others.")] = "",
    state_dir: StateDir = HOME,
) -> None:
    """Make a key. It is printed once, and kept only as a hash; a running server knows it at once."""
    if not tenant and not admin:
        raise ConfigurationFault("whose key is it? say --tenant NAME, or --admin for the server's own")
    if tenant and NAME.fullmatch(tenant) is None:
        raise ConfigurationFault(
            f"tenant = {tenant!r} cannot be used; expected letters, digits, '.', '_' and '-', at most 128"
        )
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise ConfigurationFault(f"name = {name[:80]!r} cannot be used; expected a line of at most {LONGEST_NAME}")
    key, record = KeyFile(state_dir).create(tenant, admin=admin, name=name)
    typer.echo(f"key {record.id} for {_whose(record)}; it is not shown again", err=True)
    typer.echo(key)


@keys.command("list")
def list_keys(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, state_dir: StateDir = HOME
) -> None:
    """List keys by ID; those of a --tenants file and of the environment are not among them."""
    records = KeyFile(state_dir).records()
    if json:
        rows = [{key: value for key, value in msgspec.to_builtins(each).items() if key != "digest"} for each in records]
        typer.echo(msgspec.json.format(msgspec.json.encode({"keys": rows})).decode())
        return
    console = Console()
    (console if console.is_terminal else Console(width=250)).print(_table(records))


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `dormouse keys list` shows it.")],
    state_dir: StateDir = HOME,
) -> None:
    """Revoke a key; a running server refuses it at once. Requests under way end."""
    record = KeyFile(state_dir).revoke(key_id)
    typer.echo(f"revoked key {record.id} of {_whose(record)}")


@keys.command()
def make() -> None:
    """Print a new key, and its hash for a --tenants file. Nothing is kept."""
    key = new_key()
    typer.echo(key)
    typer.echo(shown(digest_of(key.encode())))


def _whose(record: KeyRecord) -> str:
    whose = f"tenant {record.tenant}" if record.tenant else "the server"
    return f"{whose} (admin)" if record.admin else whose


def _table(records: Sequence[KeyRecord]) -> Table:
    table = Table("ID", "TENANT", "ADMIN", "CREATED", "NAME", box=None, pad_edge=False, header_style="bold")
    for record in records:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_s))
        table.add_row(record.id, record.tenant, "yes" if record.admin else "", created, record.name)
    return table
