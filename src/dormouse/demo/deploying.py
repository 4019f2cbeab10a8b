"""Brings every variant into the server: made by one process a model, with its right answers, and deployed once made.

Sources are removed once deployed, and only a few are ahead, so the disk holds little more than the images.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from dormouse.demo.child import child, failure
from dormouse.demo.fleet import Variant
from dormouse.demo.messages import Order, Start
from dormouse.demo.serving import Operator
from dormouse.errors import DormouseError
from dormouse.functions import Manifest

AT_ONCE = min(max(os.cpu_count() or 1, 2), 4)
"""Models made, and functions deployed, at the same time: each takes a core, and memory."""
SOURCES_AHEAD = 3
STOP_LIMIT_S = 5.0


class Deployment:
    """``made`` and ``deployed`` are told the name of each variant. ``start`` is for every maker, less its model."""

    def __init__(
        self,
        operator: Operator,
        start: Start,
        directory: Path,
        *,
        made: Callable[[str], None],
        deployed: Callable[[str], None],
    ) -> None:
        self._operator = operator
        self._start = start
        self._directory = directory
        self._made = made
        self._deployed = deployed
        self._makers = asyncio.Semaphore(AT_ONCE)
        self._imports = asyncio.Semaphore(AT_ONCE)
        self._sources = asyncio.Semaphore(AT_ONCE + SOURCES_AHEAD)

    async def run(self, variants: Sequence[Variant]) -> list[Variant]:
        """Deploy all; the variants in the order in which they were deployed. Raises DormouseError if one fails."""
        done: list[Variant] = []
        by_model = sorted(variants, key=lambda variant: (-variant.model.preparation_s, variant.name))
        try:
            async with asyncio.TaskGroup() as group:
                for key, same in groupby(by_model, lambda variant: variant.model.key):
                    group.create_task(self._model(key, list(same), group, done))
        except* DormouseError as faults:
            raise _first(faults) from None
        return done

    def examples_file(self, variant: Variant) -> Path:
        """Questions and right answers of a variant."""
        return self._directory / f"{variant.name}.safetensors"

    async def _model(
        self, key: str, variants: Sequence[Variant], group: asyncio.TaskGroup, done: list[Variant]
    ) -> None:
        command = (sys.executable, "-m", "dormouse.demo.preparing")
        log_file = self._directory / f"{key}.log"
        async with self._makers, child(command, log_file, stop_limit_s=STOP_LIMIT_S) as maker:
            _tell(maker, msgspec.structs.replace(self._start, model=key))
            for variant in variants:
                await self._sources.acquire()
                source = self._directory / variant.name
                _tell(maker, Order(variant.name, variant.seed, str(source), str(self.examples_file(variant))))
                manifest = await _manifest(key, maker, log_file)
                self._made(variant.name)
                group.create_task(self._deploy(variant, manifest, source, done))
            assert maker.stdin is not None
            maker.stdin.close()
            await maker.wait()

    async def _deploy(self, variant: Variant, manifest: Manifest, source: Path, done: list[Variant]) -> None:
        async with self._imports:
            await self._operator.deploy(manifest)
        shutil.rmtree(source, ignore_errors=True)
        self._sources.release()
        done.append(variant)
        self._deployed(variant.name)


def _tell(maker: asyncio.subprocess.Process, message: Start | Order) -> None:
    assert maker.stdin is not None
    maker.stdin.write(msgspec.json.encode(message) + b"\n")


async def _manifest(key: str, maker: asyncio.subprocess.Process, log_file: Path) -> Manifest:
    assert maker.stdout is not None
    line = await maker.stdout.readline()
    if not line:
        raise await failure(f"preparing {key} failed", maker, log_file)
    return msgspec.json.decode(line, type=Manifest)


def _first(faults: BaseExceptionGroup[DormouseError]) -> DormouseError:
    for fault in faults.exceptions:
        return _first(fault) if isinstance(fault, BaseExceptionGroup) else fault
    raise AssertionError("an empty group")
