"""``dormouse top``: the dashboard in a terminal. Where there is no terminal it prints one picture and ends."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from dormouse.cli.client import DEFAULT_SERVER, Refused, Server
from dormouse.cli.screen import Sort, screen
from dormouse.errors import DormouseError
from dormouse.watch.picture import Picture

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 8.0
"""Between attempts to reach a server that has gone."""
PIPE_WIDTH = 200
"""A pipe has none of its own."""


def top(
    *,
    sort: Annotated[Sort, typer.Option(help="What functions are sorted by.")] = Sort.TROUBLE,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    server: Annotated[
        str, typer.Option("--server", "--url", envvar="DORMOUSE_SERVER", help="Address of the server.")
    ] = DEFAULT_SERVER,
    key: Annotated[
        str, typer.Option("--key", envvar="DORMOUSE_KEY", help="Key for it; in the variable, others cannot see it.")
    ] = "",
    ca: Annotated[
        Path | None, typer.Option("--ca", envvar="DORMOUSE_CA", help="Certificates in PEM to trust, for https.")
    ] = None,
) -> None:
    """Watch devices, loads, the queue and functions, worst first. Ctrl-C ends it."""
    console = Console()
    with Server(server, key, ca) as remote:
        if once or not console.is_terminal:
            wide = console if console.is_terminal else Console(width=PIPE_WIDTH)
            wide.print(screen(remote.picture(), sort))
            return
        _watch(remote, sort, console)


def _watch(remote: Server, sort: Sort, console: Console) -> None:
    """Until Ctrl-C. The first attempt has to succeed; a server that goes away later is waited for."""
    picture, wait_s = remote.picture(), FIRST_WAIT_S
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    for picture in remote.watch():
                        wait_s = FIRST_WAIT_S
                        live.update(_sized(picture, sort, console), refresh=True)
                except Refused:
                    raise
                except DormouseError as fault:
                    live.update(_sized(picture, sort, console, f"{fault.message}; trying again"), refresh=True)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    except KeyboardInterrupt:
        return


def _sized(picture: Picture, sort: Sort, console: Console, notice: str = "") -> RenderableType:
    return screen(picture, sort, console.size.height, notice)
