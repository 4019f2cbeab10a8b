"""What a person sees while the demo works: bars on a terminal, a few plain lines elsewhere."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dormouse.demo.messages import Asked, Paced, Phase, Verdict
from dormouse.demo.report import PATHS


class Display:
    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False)

    @contextmanager
    def deployment(self, functions: int) -> Iterator["DeploymentBars"]:
        with self._bars() as bars:
            yield DeploymentBars(bars, functions)

    @contextmanager
    def replay(self, functions: int) -> Iterator["ReplayBars"]:
        with self._bars() as bars:
            yield ReplayBars(bars, functions)

    def _bars(self) -> Progress:
        columns = (
            TextColumn("{task.description:<22}"),
            BarColumn(30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        return Progress(*columns, console=self._console)


class DeploymentBars:
    def __init__(self, bars: Progress, functions: int) -> None:
        self._bars = bars
        self._making = bars.add_task("models and references", total=functions, detail="the first time takes longest")
        self._deploying = bars.add_task("deployed", total=functions, detail="")

    def made(self, name: str) -> None:
        self._bars.update(self._making, advance=1, detail=name)

    def deployed(self, name: str) -> None:
        self._bars.update(self._deploying, advance=1, detail=name)


class ReplayBars:
    """Fed with what the replay says."""

    def __init__(self, bars: Progress, functions: int) -> None:
        self._bars = bars
        self._tasks = {
            Phase.FIRST: bars.add_task("first requests", total=functions, detail=""),
            Phase.CALIBRATION: bars.add_task("calibration", total=2 * functions, detail=""),
            Phase.LOAD: bars.add_task("load", total=None, detail=""),
        }
        self._paths: Counter[str] = Counter()
        self._verdicts: Counter[Verdict] = Counter()

    def paced(self, paced: Paced) -> None:
        self._bars.update(self._tasks[Phase.LOAD], total=paced.requests, completed=0)

    def asked(self, asked: Asked) -> None:
        self._verdicts[asked.verdict] += 1
        if asked.phase is Phase.LOAD:
            self._paths[asked.path] += 1
        paths = " ".join(f"{path} {self._paths[path]}" for path in PATHS if self._paths[path])
        verdicts = ", ".join(f"{self._verdicts[verdict]} {verdict}" for verdict in Verdict if self._verdicts[verdict])
        self._bars.update(self._tasks[asked.phase], advance=1, detail=f"{paths}  {verdicts}".strip())
