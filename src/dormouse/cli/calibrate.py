"""``dormouse calibrate``: measure this machine's links and show what came out."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dormouse.calibration import calibrate, this_machine
from dormouse.cli.start import HOME
from dormouse.cli.tables import size
from dormouse.device.measuring import CardMeasured, MapCost, Measured, PairMeasured, Rate

NO_CARD = "no NVIDIA GPU was found: nothing to measure, the CPU device goes by what is assumed"


def calibrate_command(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    state_dir: Annotated[
        Path, typer.Option(help="Where the result is kept. [default: ~/.dormouse]", show_default=False)
    ] = HOME,
) -> None:
    """Measure this machine's links and what mapping costs; the next start of a server goes by it."""
    machine = this_machine()
    if machine is None:
        typer.echo(msgspec.json.encode({"cards": [], "pairs": [], "notes": [NO_CARD]}).decode() if json else NO_CARD)
        return
    measured = calibrate(state_dir, machine)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(measured)).decode())
        return
    for line in described(measured):
        typer.echo(line)


def described(measured: Measured) -> list[str]:
    """Everything that was measured, for people."""
    lines = []
    for name, card in zip(measured.machine.cards, measured.cards, strict=True):
        lines += [f"{card.device}: {name}", *_card_lines(card)]
    for pair in measured.pairs:
        lines += _pair_lines(pair)
    return [*lines, *measured.notes, f"measured in {measured.took_ns / 1e9:.1f} s"]


def _card_lines(card: CardMeasured) -> list[str]:
    return [
        f"  from host memory, GB/s by piece: {_rates(card.from_host)}",
        f"  95 % of the best from pieces of {size(card.elbow_bytes)}",
        f"  to host memory: {_gb(card.to_host_bytes_per_s)} GB/s",
        *(f"  chunks of {size(cost.chunk_bytes)}: {_map_line(cost)}" for cost in card.maps),
        f"  so loads map {'before they copy' if card.maps_ahead else 'beside their copies'}",
    ]


def _map_line(cost: MapCost) -> str:
    map_us, beside_us, unmap_us = (ns / 1e3 for ns in (cost.map_ns, cost.beside_copies_ns, cost.unmap_ns))
    return f"map {map_us:.0f} us, beside copies {beside_us:.0f} us, unmap {unmap_us:.0f} us"


def _pair_lines(pair: PairMeasured) -> list[str]:
    lines = [f"{pair.source} to {pair.destination}", f"  host to both at once: {_gb(pair.both_links_bytes_per_s)} GB/s"]
    if pair.peer:
        lines.append(f"  from GPU to GPU, GB/s by piece: {_rates(pair.peer)}")
        lines.append(f"  host to {pair.destination} over both links: {_gb(pair.two_links_bytes_per_s)} GB/s")
    return lines


def _rates(rates: tuple[Rate, ...]) -> str:
    return ", ".join(f"{size(rate.size_bytes)} {_gb(rate.bytes_per_s)}" for rate in rates)


def _gb(bytes_per_s: int) -> str:
    return f"{bytes_per_s / 1e9:.1f}"
