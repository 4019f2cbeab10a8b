"""A node of many functions that are all busy, for volume: an honest picture of made-up figures behind Submit."""

import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dormouse.submit import Owner
from dormouse.watch.picture import Device, Host, Load, Picture, Place, Point, Waiting, Watched, totals_of
from tests.shell.in_memory import InMemory

MIB = 1024 * 1024
CHUNK = 2 * MIB
KINDS = ("minilm", "resnet", "whisper", "distilbert", "yolo", "t5", "clip", "crepe")
CHANGED = 120
"""Functions that were asked from one picture to the next."""
PICTURES_A_POINT = 20


@dataclass
class Crowd(InMemory):
    """Every picture is the next one."""

    functions_wanted: int = 500
    devices_wanted: int = 8
    names: list[str] = field(default_factory=list)
    rows: dict[str, Watched] = field(default_factory=dict)
    points: dict[str, deque[Point | None]] = field(default_factory=dict)
    pictures: int = 0
    bucket: int = 60

    def __post_init__(self) -> None:
        self.random = random.Random(7)
        for number in range(self.functions_wanted):
            name = f"{self.random.choice(KINDS)}-{number:03d}"
            self.names.append(name)
            deadline = self.random.choice((50.0, 100.0, 250.0, 1000.0))
            self.points[name] = deque((self._point(deadline) for _ in range(60)), maxlen=60)
            self.rows[name] = self._row(number, name, deadline)

    def _point(self, deadline: float) -> Point | None:
        if self.random.random() < 0.2:
            return None
        answers = self.random.randint(1, 90)
        return Point(round(deadline * self.random.lognormvariate(-0.7, 0.4), 2), answers, answers, answers)

    def _row(self, number: int, name: str, deadline: float) -> Watched:
        requests = self.random.randint(0, 20_000)
        in_time = round(
            requests * (self.random.uniform(0.9, 0.97) if number % 25 == 3 else self.random.uniform(0.985, 1))
        )
        resident = round(requests * self.random.uniform(0.6, 0.95))
        on = (f"cuda:{number % self.devices_wanted}",) if number < self.functions_wanted // 3 else ()
        disk = 0 if on else self.random.randint(0, 1)
        return Watched(
            name=name,
            version="1",
            tenant=self.random.choice(("", "acme", "globex")),
            public=False,
            state="READY",
            tier=on[0] if on else ("disk" if disk else "host"),
            pin="none",
            image_bytes=self.random.randint(20, 700) * MIB,
            state_bytes=0,
            deadline_ms=deadline,
            percentile=98,
            on=on,
            queued=self.random.randint(1, 9) if number % 40 == 0 else 0,
            requests=requests,
            in_time=in_time,
            compliant=in_time >= 0.98 * requests,
            requests_per_s=round(self.random.expovariate(0.4), 2),
            p50_ms=round(deadline * 0.3, 2),
            p95_ms=round(deadline * 0.6, 2),
            p98_ms=round(deadline * self.random.uniform(0.5, 1.3), 2),
            paths={"resident": resident, "host": requests - resident} if requests else {},
            loads={"host": 40 + number},
            refusals={"timeout": 3} if number % 25 == 3 else {},
            evictions=self.random.randint(0, 60),
            waste_bytes=self.random.randint(0, CHUNK),
            cost_nanos=requests * 5_000,
            cost_in_time=in_time,
        )

    def owner(self, name: str) -> Owner:
        return Owner(self.rows[name].tenant, public=False)

    def function(self, name: str) -> dict[str, Any]:
        row = self.rows[name]
        times = {"p50_ms": row.p50_ms, "p95_ms": row.p95_ms, "p98_ms": row.p98_ms}
        return {
            "source": f"/models/{name}",
            "pin": row.pin,
            "tenant": row.tenant,
            "public": row.public,
            "durable": True,
            "batch": {"rows": 8, "wait_ms": 2.0, "refused": {}},
            "disk": {"extra_ms": 140.0},
            "paths": {path: {"requests": count, **times} for path, count in row.paths.items()},
        }

    def picture(self) -> Picture:
        self.pictures += 1
        for name in self.random.sample(self.names, min(CHANGED, len(self.names))):
            self._asked(name)
        if self.pictures % PICTURES_A_POINT == 0:
            self.bucket += 1
            for name, points in self.points.items():
                points.append(self._point(self.rows[name].deadline_ms))
        return Picture(
            at_ms=round(time.time() * 1000, 1),
            bucket_ms=5000,
            bucket=self.bucket,
            functions=dict(self.rows),
            histories={name: tuple(points) for name, points in self.points.items()},
            totals=totals_of(self.rows),
            devices=tuple(self._device(number) for number in range(self.devices_wanted)),
            loads=self._loads(),
            queue=self._queue(),
            host=Host(64 * 1024 * MIB, 51 * 1024 * MIB, 55 * 1024 * MIB, self.functions_wanted - 30),
            currency="USD",
        )

    def _asked(self, name: str) -> None:
        row = self.rows[name]
        paths = {**row.paths, "resident": row.paths.get("resident", 0) + 3}
        values = {field: getattr(row, field) for field in Watched.__struct_fields__}
        changed = {"requests": row.requests + 3, "in_time": row.in_time + 3, "paths": paths}
        self.rows[name] = Watched(**(values | changed | {"p98_ms": round(row.p98_ms * 1.0001, 2)}))

    def _device(self, number: int) -> Device:
        name = f"cuda:{number}"
        mine = [row for row in self.rows.values() if name in row.on]
        places = tuple(
            Place(row.name, -(-row.image_bytes // CHUNK) * CHUNK, self._state(number, at))
            for at, row in enumerate(mine)
        )
        taken = sum(place.bytes for place in places)
        return Device(
            executor=name,
            device=name,
            description="NVIDIA H200, driver 580.1",
            here=number != 6,
            capacity_bytes=12 * 1024 * MIB,
            chunk_bytes=CHUNK,
            free_bytes=12 * 1024 * MIB - taken,
            waste_bytes=len(places) * MIB,
            link_bytes_per_s=52_000_000_000,
            lent_to="cuda:1" if number == 2 else None,
            executing=places[self.pictures % len(places)].function if places and number % 3 != 2 else None,
            together=4 if number == 0 else 1,
            restarts=1 if number == 6 else 0,
            places=places,
        )

    def _state(self, number: int, at: int) -> str:
        return "loading" if number == 1 and at == 2 else "evicting" if at == 4 else "resident"

    def _loads(self) -> tuple[Load, ...]:
        now = time.time() * 1000
        on_one = next((row.name for row in list(self.rows.values())[17:] if row.on == ("cuda:1",)), None)
        if on_one is None:
            return ()
        reading = self.names[-1]
        return (
            Load(on_one, "cuda:1", "host", 340 * MIB, round(now - 4, 1), 9000, helpers=("cuda:2",)),
            Load(reading, "host", "disk", 120 * MIB, round(now - 3000, 1), 8000),
        )

    def _queue(self) -> tuple[Waiting, ...]:
        now = time.time() * 1000
        waits = [row for row in self.rows.values() if row.queued]
        return tuple(
            Waiting(row.name, row.queued, round(now // 1000 * 1000 - 40 * at, 1), "requests before it run on cuda:0")
            for at, row in enumerate(waits[:12])
        )
