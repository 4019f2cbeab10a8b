"""The demo from start to end: many real models on a small device, a bursty load, every answer checked.

Puts the parts together and decides nothing else. Imports no torch: the models live in processes of their own.
"""

import asyncio
import os
import platform
import signal
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console

from dormouse import __version__
from dormouse.config import MIB
from dormouse.core.types import Bytes
from dormouse.demo import packages, workspace
from dormouse.demo.child import child, failure
from dormouse.demo.deploying import Deployment
from dormouse.demo.display import Display
from dormouse.demo.fleet import Variant, fleet
from dormouse.demo.messages import Asked, Line, LoadPlan, Paced, Start, Target
from dormouse.demo.report import Figures, Setting, complaints, figures, rendered
from dormouse.demo.serving import Operator, server
from dormouse.errors import ConfigurationFault

CODE = Path(__file__).parent / "code"
DEVICE_BYTES: Bytes = 512 * MIB
HOST_SHARE = 0.97
"""Of all images, what host memory holds: the one that nobody has asked for longest sleeps on disk."""
SEED = 1
INTERRUPTED = 130
STOP_LIMIT_S = 5.0


class Demo(Struct, frozen=True):
    """One run."""

    variants: tuple[Variant, ...]
    seconds: float
    device: str
    device_bytes: Bytes = DEVICE_BYTES
    threads: int = max((os.cpu_count() or 1) - 1, 1)
    """Of torch, for the server's executor and for the right answers alike: order of summation depends on it."""


def run(seconds: float, device: str, json_file: Path | None) -> int:
    """Run the demo; its exit status. Raises DormouseError if it cannot be run at all."""
    if not seconds > 0:
        raise ConfigurationFault(f"--seconds {seconds} cannot be used; expected a positive number")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigurationFault(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
    packages.require()
    console = Console()
    try:
        found = asyncio.run(demonstrate(Demo(fleet(), seconds, device), console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted")
        return INTERRUPTED
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0 if found.all_right else 1


async def demonstrate(demo: Demo, console: Console) -> Figures:
    """Prepare, serve, ask, check, report."""
    _cancel_on_signals()
    display = Display(console)
    cache = workspace.cache_directory()
    with workspace.run_directory(cache) as directory:
        memory = f"{demo.device_bytes // MIB} MiB of device memory"
        display.say(f"{len(demo.variants)} functions, {memory}, device {demo.device}")
        async with server(directory / "state", _options(demo), directory / "server.log") as operator:
            start = Start("", str(cache), demo.device, demo.threads)
            with display.deployment(len(demo.variants)) as bars:
                deployment = Deployment(operator, start, directory, made=bars.made, deployed=bars.deployed)
                deployed = await deployment.run(demo.variants)
            targets = tuple(
                Target(each.name, each.model.key, each.popularity, str(deployment.examples_file(each)))
                for each in deployed
            )
            asked, paced = await _replayed(LoadPlan(operator.url, targets, demo.seconds, SEED), directory, display)
            found = figures(asked, paced, await _setting(operator, demo))
    console.print(rendered(found, paced))
    for line in complaints(asked):
        display.say(f"  {line}")
    return found


def _cancel_on_signals() -> None:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does, unless whoever started it ignores them (nohup)."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _options(demo: Demo) -> list[str]:
    host_bytes = int(sum(variant.model.image_mb for variant in demo.variants) * 1e6 * HOST_SHARE)
    settings = {
        "--device": demo.device,
        "--device-bytes": demo.device_bytes,
        "--host-bytes": host_bytes,
        "--threads": demo.threads,
        "--allow-code": CODE,
    }
    return [str(word) for pair in settings.items() for word in pair]


async def _replayed(plan: LoadPlan, directory: Path, display: Display) -> tuple[list[Asked], Paced]:
    """Everything that was asked, and what the load was made from. Raises DormouseError if the replay breaks off."""
    asked: list[Asked] = []
    paced: Paced | None = None
    command, log_file = (sys.executable, "-m", "dormouse.demo.replay"), directory / "replay.log"
    async with child(command, log_file, stop_limit_s=STOP_LIMIT_S) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(plan))
        process.stdin.close()
        with display.replay(len(plan.targets)) as bars:
            async for text in process.stdout:
                line: Line = msgspec.json.decode(text, type=Line)
                if isinstance(line, Paced):
                    paced = line
                    bars.paced(line)
                else:
                    asked.append(line)
                    bars.asked(line)
        if await process.wait() != 0 or paced is None:
            raise await failure("the load broke off", process, log_file)
    return asked, paced


async def _setting(operator: Operator, demo: Demo) -> Setting:
    rows, node = await operator.functions(), await operator.node()
    return Setting(
        model_of={variant.name: variant.model.key for variant in demo.variants},
        total_bytes=sum(row["image_bytes"] for row in rows),
        device_bytes=sum(device["capacity_bytes"] for device in node["devices"]),
        evictions=sum(row["evictions"] for row in rows),
        seconds=demo.seconds,
        versions={
            "dormouse": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
        },
        device=", ".join(str(executor["device"]) for executor in node["executors"]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
