"""One node: catalog, host store, executors and core behind the Submit seam.

Turns names into revisions, sources into images, requests into events, and back. Decides nothing about order, place
or memory.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dormouse.calibration import stored, this_machine
from dormouse.config import Config
from dormouse.control.accounts import Accounts
from dormouse.control.batching import likeness
from dormouse.control.cashier import Cashier
from dormouse.control.catalog import Catalog, Deployed
from dormouse.control.controller import Controller
from dormouse.control.devices import devices_of
from dormouse.control.importer import Imported, import_source
from dormouse.control.inventory import batch_row, disk_row, function_row, host_row, index_entry, statistics_of
from dormouse.control.payloads import Payloads
from dormouse.control.portrait import Portrait
from dormouse.control.processes import ExecutorProcesses
from dormouse.control.topology import links_of
from dormouse.control.watching import Watching
from dormouse.core.messages import (
    FunctionDeployed,
    LoadRequested,
    RemovalRequested,
    RequestArrived,
    RequestCancelled,
    UnloadRequested,
)
from dormouse.core.policies import with_policies
from dormouse.core.state import Service
from dormouse.core.types import FunctionId, FunctionSpec, RequestId, Settings
from dormouse.device.measuring import Measured
from dormouse.errors import (
    ConfigurationFault,
    DormouseError,
    StateNotKept,
    UnknownFunction,
    error_for,
    unknown_function,
)
from dormouse.functions import Manifest, batch_of, checked, function_id, limits_of, name_of, revision_of, slo_of
from dormouse.journal import JournalWriter
from dormouse.metrics.books import Books
from dormouse.store.host import HostStore
from dormouse.submit import Chunk, Description, IndexEntry, Inference, Owner, Statistics
from dormouse.watch.picture import Picture

_LOG = logging.getLogger("dormouse.control")
FEWEST_READERS = 4
"""Threads that read images; more where there are more cores."""
STATE_LIMIT_S = 30.0
"""How long a shutdown waits for runtime state to be written home."""


class Node:
    """Implements ``submit.Submit``. Made by ``open``."""

    def __init__(self, config: Config, catalog: Catalog) -> None:
        self._devices = devices_of(config.device)
        links = links_of(config, self._devices, _measured(config, self._devices))
        self._config = config
        self._catalog = catalog
        self._images = config.state_dir / "images"
        self._payloads = Payloads(config.request_slab_bytes)
        self._executors = ExecutorProcesses(config, self._payloads.slab, links)
        cores = max(2, os.cpu_count() or 1)
        self._imports = asyncio.Semaphore(cores)
        self._store = HostStore(config.host_bytes, self._executors.arena_grown, threads=max(FEWEST_READERS, cores))
        self._durable = config.images == "disk"
        plain = Settings(
            host_capacity_bytes=config.host_bytes,
            host_is_last=not self._durable,
            shed_late=config.shed == "late",
            queue_length=config.queue_length,
            concurrent_reads=max(2, cores // 4),
            topology=links.topology,
        )
        settings = with_policies(config.policy, plain)
        self._cashier = None if config.ledger == "off" else _cashier(config, self._payloads)
        self._controller = Controller(
            settings,
            executors=self._executors,
            store=self._store,
            payloads=self._payloads,
            directory_of=self._directory_of,
            journal=None if config.journal is None else JournalWriter(config.journal, settings),
            cashier=self._cashier,
        )
        self._state = self._controller.core.state
        self._accounts = Accounts(self._state)
        self._functions: dict[str, Deployed] = {}
        """The revision that each name stands for."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        portrait = Portrait(self._state, self._executors, self._store.arena)
        costs = None if self._cashier is None else self._cashier.costs()
        self._watching = Watching(portrait, self._functions, costs)

    # ------------------------------------------------------------------ from start to end

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config) -> AsyncIterator["Node"]:
        """A node with its executors started and what it knew before a restart. Raises ConfigurationFault."""
        try:
            (config.state_dir / "images").mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise ConfigurationFault(f"state_dir = {config.state_dir}: {fault.strerror}") from None
        with _owned(config.state_dir), contextlib.closing(Catalog(config.state_dir / "catalog.sqlite")) as catalog:
            node = cls(config, catalog)
            try:
                await node._start()
                yield node
            finally:
                await node._close()

    async def _start(self) -> None:
        faults = await self._executors.start(self._devices, self._store.arena, self._controller.post, self._state)
        if not self._state.executors:
            raise ConfigurationFault("; ".join(faults) or f"device = {self._config.device!r}: no executor started")
        if self._cashier is not None:
            self._cashier.begin(max(executor.capacity_bytes for executor in self._state.executors.values()))
        self._forget_leftovers()
        for deployed in self._functions.values():
            self._restore(deployed)
        self._watching.start()

    def _forget_leftovers(self) -> None:
        """Keep the revisions that the catalog knows; remove what a crash left of any other."""
        lost = [deployed for deployed in self._catalog.functions() if not deployed.durable]
        for deployed in lost:
            self._catalog.remove(deployed.name, deployed.revision)
        if lost:
            names = ", ".join(deployed.name for deployed in lost)
            _LOG.warning("forgotten, because their images lived in memory only; deploy them again: %s", names)
        self._functions.update({deployed.name: deployed for deployed in self._catalog.functions()})
        kept = {self._directory_of(_id(deployed)) for deployed in self._functions.values()}
        for directory in self._images.glob("*/*"):
            if directory not in kept:
                shutil.rmtree(directory, ignore_errors=True)
        for directory in self._images.glob("*"):
            with contextlib.suppress(OSError):  # which says that it is not empty
                directory.rmdir()

    def _restore(self, deployed: Deployed) -> None:
        """The core knows it at once; its image is parked meanwhile, where there is room."""
        spec, available = _spec(deployed), deployed.available
        self._belongs(deployed)
        self._controller.begin(lambda op: FunctionDeployed(op, spec, restored=True, available=available))

    def _belongs(self, deployed: Deployed) -> None:
        if self._cashier is not None:
            self._cashier.belongs(_id(deployed), deployed.manifest.tenant)

    async def _close(self) -> None:
        await self._watching.close()
        await self._bring_state_home()
        await self._executors.stop()
        await self._controller.close()
        await self._store.close()
        self._payloads.close()

    async def _bring_state_home(self) -> None:
        """Unload what keeps runtime state on a device, so that it reaches the disk; it is loaded again at the start."""
        if not self._durable:
            return
        stateful = [f.id for f in self._state.functions.values() if f.spec.state_bytes and f.residencies]
        try:
            async with asyncio.timeout(STATE_LIMIT_S):
                await asyncio.gather(*map(self._unload, stateful))
        except (TimeoutError, DormouseError) as fault:
            _LOG.error("runtime state of %s was not brought home: %s", ", ".join(stateful), fault or "it took too long")

    async def _unload(self, function: FunctionId) -> None:
        await self._controller.operate(lambda op: UnloadRequested(op, function))

    # ------------------------------------------------------------------ names

    def _directory_of(self, function: FunctionId) -> Path:
        return self._images / name_of(function) / str(revision_of(function))

    def _find(self, name: str, version: str | None = None) -> Deployed:
        deployed = self._functions.get(name)
        if deployed is None:
            raise unknown_function(name)
        if version not in (None, "", str(deployed.revision)):
            raise UnknownFunction(f"model '{name}' has version {deployed.revision}, not '{version}'")
        return deployed

    # ------------------------------------------------------------------ questions

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return bool(self._state.executors)

    def owner(self, name: str) -> Owner:
        manifest = self._find(name).manifest
        return Owner(manifest.tenant, manifest.public)

    def describe(self, name: str, version: str | None = None) -> Description:
        deployed = self._find(name, version)
        manifest, versions = deployed.manifest, (str(deployed.revision),)
        return Description(
            name,
            versions,
            deployed.platform,
            deployed.signature,
            manifest.batch,
            manifest.slo,
            manifest.limits,
            task=deployed.task,
            directory="" if deployed.task is None else str(self._directory_of(_id(deployed))),
            deployed_s=deployed.deployed_s,
        )

    def function_ready(self, name: str, version: str | None = None) -> bool:
        function = self._state.functions.get(_id(self._find(name, version)))
        return function is not None and function.service is Service.READY and self.ready()

    def index(self) -> Sequence[IndexEntry]:
        return [index_entry(d, self._state.functions.get(_id(d))) for d in self._functions.values()]

    def statistics(self, name: str | None = None, version: str | None = None) -> Sequence[Statistics]:
        found = self._functions.values() if name is None else [self._find(name, version)]
        offset_ns = time.time_ns() - self._controller.now()
        return [statistics_of(d, self._state.functions.get(_id(d)), offset_ns) for d in found]

    def functions(self) -> list[dict[str, Any]]:
        return [self._row(deployed) for deployed in self._functions.values()]

    def function(self, name: str) -> dict[str, Any]:
        return self._row(self._find(name))

    def _row(self, deployed: Deployed) -> dict[str, Any]:
        function = _id(deployed)
        row = function_row(deployed, self._state.functions.get(function), self._executors.graphs_of(function))
        return row | {"batch": batch_row(deployed, self._state), "disk": disk_row(deployed, self._state)}

    def picture(self) -> Picture:
        return self._watching.picture(self._controller.now())

    def node(self) -> dict[str, Any]:
        server = {"pid": os.getpid(), "python_blocks": sys.getallocatedblocks()}
        return {**host_row(self._state, self._store), "executors": self._executors.describe(), "server": server}

    def books(self) -> Books:
        deployed, devices = self._functions.values(), self._executors.books()
        return self._accounts.books(deployed, devices, self._store, self._controller.now())

    # ------------------------------------------------------------------ requests

    async def infer(self, inference: Inference) -> AsyncGenerator[Chunk, None]:
        deployed = self._find(inference.name, inference.version)
        function = _id(deployed)
        if self._cashier is not None:
            self._cashier.check()
        began_ns = self._controller.now() if inference.began_ns is None else inference.began_ns
        request = self._payloads.accept(function, inference, began_ns)
        answers = self._payloads[request].answers
        rows, alike = likeness(inference) if deployed.manifest.batch.rows > 1 else (1, "")
        self._controller.post(
            RequestArrived(
                request,
                function,
                None if inference.slo_ns is None else began_ns + inference.slo_ns,
                None if inference.timeout_ns is None else began_ns + inference.timeout_ns,
                inference.priority,
                rows,
                alike,
                None if inference.tenant == deployed.manifest.tenant else inference.tenant,
                inference.began_ns,
            )
        )
        final = False
        try:
            while not final:
                answer = await answers.get()
                final = isinstance(answer, DormouseError) or answer.reply.final
                if isinstance(answer, DormouseError):
                    raise answer
                reply = answer.reply
                version = str(deployed.revision)
                name = "" if self._cashier is None else self._cashier.name_of(request)
                yield Chunk(answer.outputs, final, version, reply.path, reply.queued_ns, reply.device_ns, name)
        finally:
            if not final:
                self._cancel(request)

    def _cancel(self, request: RequestId) -> None:
        self._controller.post(RequestCancelled(request))

    # ------------------------------------------------------------------ operations

    async def load(self, name: str) -> None:
        self._find(name)  # before a lock is made for it
        async with self._locks[name]:
            deployed = self._find(name)
            await self._controller.operate(lambda op: LoadRequested(op, _id(deployed)))
            self._catalog.set_available(name, deployed.revision, True)

    async def unload(self, name: str) -> None:
        self._find(name)
        async with self._locks[name]:
            deployed = self._find(name)
            if self._durable:  # else it is refused, and stays as it is
                self._catalog.set_available(name, deployed.revision, False)
            await self._unload(_id(deployed))

    async def deploy(self, manifest: Manifest) -> str:
        checked(manifest, f"'{manifest.name}'")
        async with self._locks[manifest.name]:
            revision = self._catalog.next_revision(manifest.name)
            directory = self._directory_of(function_id(manifest.name, revision))
            imported = await self._imported(manifest, directory)
            deployed = _deployed(manifest, revision, imported, durable=self._durable)
            self._belongs(deployed)
            try:
                await self._controller.operate(lambda op: FunctionDeployed(op, _spec(deployed)))
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            try:
                self._catalog.add(deployed)
            except StateNotKept:
                await self._retire(deployed)
                raise
            replaced = self._functions.get(manifest.name)
            self._functions[manifest.name] = deployed
            if replaced is not None:
                self._accounts.leaving(replaced.name, _id(replaced))
                if replaced.manifest.tenant != manifest.tenant:
                    self._accounts.passed_on(replaced.name, replaced.manifest.tenant)
                await self._retire(replaced)
        _LOG.info("deployed '%s' version %d, %d bytes", manifest.name, revision, deployed.image_bytes)
        return str(revision)

    async def _imported(self, manifest: Manifest, target: Path | None) -> Imported:
        """As many at once as there are cores: more would only hold more memory."""
        async with self._imports:
            like = None if manifest.like is None else self._directory_of(_id(self._find(manifest.like)))
            code, inspect = self._config.allow_code, target is None
            return await import_source(manifest, target, code, inspect=inspect, durable=self._durable, like=like)

    async def remove(self, name: str) -> None:
        self._find(name)
        async with self._locks[name]:
            deployed = self._find(name)
            # The catalog first: a crash in between leaves an image that nobody knows, never a name without its image.
            self._catalog.remove(name, deployed.revision)
            self._accounts.leaving(name, _id(deployed))
            await self._retire(deployed)
            del self._functions[name]
            self._accounts.passed_on(name, deployed.manifest.tenant)
        _LOG.info("removed '%s'", name)

    async def _retire(self, deployed: Deployed) -> None:
        """Take a revision that the catalog has forgotten out of service; what it has queued is served first."""
        await self._controller.operate(lambda op: RemovalRequested(op, _id(deployed)))
        self._accounts.left(_id(deployed))

    async def check(self, manifest: Manifest) -> dict[str, Any]:
        checked(manifest, f"'{manifest.name}'")
        imported = await self._imported(manifest, None)
        latest = self._functions.get(manifest.name)
        deployed = _deployed(manifest, 0, imported)
        refusal = self._controller.core.preview(_spec(deployed))
        return {
            "name": manifest.name,
            "replaces_version": None if latest is None else str(latest.revision),
            "image_bytes": imported.image_bytes,
            "state_bytes": imported.state_bytes,
            "platform": imported.platform,
            "inputs": [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in imported.signature.inputs],
            "outputs": [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in imported.signature.outputs],
            "admitted": refusal is None,
            "refusal": None if refusal is None else error_for(refusal.reason, refusal.message).message,
        }


def _measured(config: Config, devices: list[str]) -> Measured | None:
    """What is known of this machine's links; the CPU device has none."""
    if config.calibrate == "off" or not all(device.startswith("cuda") for device in devices):
        return None
    machine = this_machine()
    return None if machine is None else stored(config.state_dir, machine)


def _cashier(config: Config, payloads: Payloads) -> Cashier:
    return Cashier.open(config.state_dir, config.ledger_sync, config.tariff, payloads, time.monotonic_ns())


@contextlib.contextmanager
def _owned(state_dir: Path) -> Iterator[None]:
    """Keep others out: a second server would take the first one's images for leftovers. Raises ConfigurationFault."""
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context((state_dir / "lock").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends, however it does
        except BlockingIOError:
            message = "another server uses it; give each its own --state-dir"
            raise ConfigurationFault(f"state_dir = {str(state_dir)!r}: {message}") from None
        except OSError as fault:
            raise ConfigurationFault(f"state_dir = {str(state_dir)!r} cannot be written: {fault.strerror}") from None
        yield


def _id(deployed: Deployed) -> FunctionId:
    return function_id(deployed.name, deployed.revision)


def _spec(deployed: Deployed) -> FunctionSpec:
    manifest = deployed.manifest
    return FunctionSpec(
        id=_id(deployed),
        image_bytes=deployed.image_bytes,
        state_bytes=deployed.state_bytes,
        slo=slo_of(manifest),
        pin=manifest.pin,
        limits=limits_of(manifest),
        batch=batch_of(manifest),
    )


def _deployed(manifest: Manifest, revision: int, imported: Imported, *, durable: bool = True) -> Deployed:
    return Deployed(
        manifest=manifest,
        revision=revision,
        image_bytes=imported.image_bytes,
        state_bytes=imported.state_bytes,
        signature=imported.signature,
        platform=imported.platform,
        durable=durable,
        task=imported.task,
        deployed_s=int(time.time()),
    )
