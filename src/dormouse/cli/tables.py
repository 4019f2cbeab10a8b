"""Tables for people: what is deployed and how it has been served, and the node below it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_NUMBERS = ("SIZE", "REQUESTS", "P50 ms", "P98 ms", "EVICTED")
_NAMED = 5
"""Functions that a line names before it counts the rest."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def functions_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """``ps``: one row a function, one line in it for each path that requests have taken."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", overflow="fold")
    for heading in ("VERSION", "TIER", "SIZE", "PIN", "PATH", "REQUESTS", "P50 ms", "P98 ms", "EVICTED", "IN SLO"):
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True)
    for row in sorted(rows, key=lambda row: str(row["name"])):
        paths: Mapping[str, Mapping[str, Any]] = row.get("paths") or {}
        table.add_row(
            str(row["name"]),
            str(row["version"]),
            str(row["tier"]) if row["state"] == "READY" else str(row["state"]).lower(),
            size(row["image_bytes"]),
            "" if row["pin"] == "none" else str(row["pin"]),
            "\n".join(paths),
            "\n".join(str(path["requests"]) for path in paths.values()) or "0",
            "\n".join(f"{path['p50_ms']:.1f}" for path in paths.values()),
            "\n".join(f"{path['p98_ms']:.1f}" for path in paths.values()),
            str(row.get("evictions", 0)),
            _compliance(row),
        )
    return table


def _compliance(row: Mapping[str, Any]) -> str:
    if not row.get("requests"):
        return ""
    return "yes" if row.get("compliant") else "[red]no[/red]"


def eager_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Functions that cannot be replayed as CUDA graphs, and why: a line for each reason."""
    why: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: str(row["name"])):
        for graphs in (row.get("graphs") or {}).values():
            names = why.setdefault(str(graphs["eager_because"]), [])
            if str(row["name"]) not in names:
                names.append(str(row["name"]))
    why.pop("", None)
    return [f"without CUDA graphs: {_listed(names)}: {reason}" for reason, names in why.items()]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def node_lines(node: Mapping[str, Any]) -> list[str]:
    """What the node has and how much of it is taken."""
    host = node["host"]
    only = ", in memory only" if host.get("images_in") == "dram" else ""
    lines = [f"host {size(host['used_bytes'])} of {size(host['capacity_bytes'])}, {host['images']} images{only}"]
    for device in node["devices"]:
        taken = device["capacity_bytes"] - device["free_bytes"]
        where = f"{device['device']} {size(taken)} of {size(device['capacity_bytes'])}"
        lines.append(
            f"{where}, {device['resident']} functions resident, {size(device['waste_bytes'])} in last chunks unused"
        )
    lines.append(f"{node['functions_compliant']} of {node['functions']} functions inside their SLO")
    return lines


def size(size_bytes: float) -> str:
    """``87.3 MiB``."""
    for unit in _UNITS:
        if size_bytes < 1024 or unit == _UNITS[-1]:
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
