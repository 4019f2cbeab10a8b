"""A state directory with many tiny functions: one is deployed, the others are copies of its image under other names."""

import shutil
from pathlib import Path

from bench.crash.server import Server
from msgspec.structs import replace

from dormouse.control.catalog import Catalog


def furnish(state_dir: Path, functions: int) -> None:
    """``f0`` and on."""
    state_dir.mkdir()
    server = Server(state_dir, ["--ledger", "off"])
    server.start()
    server.deploy(1)
    server.stop()
    catalog = Catalog(state_dir / "catalog.sqlite")
    (first,) = catalog.functions()
    for number in range(1, functions):
        name = f"f{number}"
        shutil.copytree(state_dir / "images" / "f0" / "1", state_dir / "images" / name / "1")
        catalog.add(replace(first, manifest=replace(first.manifest, name=name)))
    catalog.close()
