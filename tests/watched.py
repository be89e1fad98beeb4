"""Run directories with the metrics, events, machines and samples of a crew, for tests of what reads them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuadrilla.rundir import FolderLock, RunDir, node_file, write_json

START = 1_795_569_000.0
GIB = 2**30
SAMPLE = "En un pueblo vivía una niña que se llamaba Sofía. Un domingo encontró una tortuga cerca del parque."


@dataclass(frozen=True, kw_only=True)
class WrittenCrew:
    """`speeds`: relative speed of each machine. `state`: any but "running" is that of a run that has ended."""

    folder: Path
    speeds: Mapping[str, float]
    rounds: int = 400
    state: str = "complete"
    seconds: float = 0.4
    """Seconds of a round."""
    now: float = 0.0
    """Time of the last row; 0 means that the run began at `START`."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder)

    @property
    def began(self) -> float:
        return (self.now or START + self.rounds * self.seconds) - self.rounds * self.seconds

    def write(self) -> RunDir:
        self.folder.mkdir(parents=True, exist_ok=True)
        add_rows(self.run.metrics, [self.row(version) for version in range(1, self.rounds + 1)])
        events = [{"time": self.began, "event": "joined", "worker": name} for name in self.speeds]
        add_rows(self.run.events, events)
        write_json(self.run.status, {"state": self.state, "version": self.rounds})
        return self.run

    def row(self, version: int, *, names: Sequence[str] = ()) -> dict[str, Any]:
        """A row of the metrics, in which the machines `names` (default: all) have shares by their speeds."""
        speeds = {name: speed for name, speed in self.speeds.items() if name in (names or self.speeds)}
        total = sum(speeds.values())
        wobble = math.sin(version * 1.7) * 0.05
        row = {
            "version": version,
            "tokens": version * 3328,
            "loss": 6.9 * math.exp(-version / 90) + 1.2 + wobble,
            "workers": len(speeds),
            "shares": {name: round(speed / total, 4) for name, speed in speeds.items()},
            "grad_norm": 0.4 + 2 * math.exp(-version / 60) + wobble,
            "tokens_per_second": 9000 * (1 + wobble),
            "seconds": self.seconds,
        }
        if version % 40 == 0:
            loss = 6.9 * math.exp(-version / 90) + 1.3
            row |= {"val_loss": loss, "val_bits_per_byte": loss / 2.6, "sample": f"{SAMPLE} ({version})"}
        return row

    def usage(self, name: str, at: float, *, step: int) -> dict[str, Any]:
        """A row of `nodes/NAME.jsonl`."""
        waits = 0.08 + 0.06 * math.sin(step / 5 + len(name))
        busy = 100 * (1 - waits) * (0.9 + 0.08 * math.sin(step / 3 + len(name)))
        return {
            "time": at, "kind": "usage", "cpu_percent": round(busy, 1), "memory_used_bytes": int(5.2 * GIB),
            "memory_bytes": 16 * GIB, "disk_free_bytes": 118 * GIB, "disk_bytes": 512 * GIB,
            "network_sent_bytes_per_second": 2_100_000.0,
            "network_received_bytes_per_second": 1_900_000.0, "temperature_celsius": 61.0 + 4 * math.sin(step / 9),
            "phase": ("computing", "sending", "computing", "receiving", "waiting")[step % 5],
            "waiting_part": round(waits, 3), "sent_bytes_per_second": 1_800_000.0,
            "received_bytes_per_second": 1_700_000.0, "round_trip_seconds": 0.0021,
        }  # fmt: skip


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def rows_of(run: RunDir, name: str) -> Path:
    return run.nodes / node_file(name)


HELD: list[FolderLock] = []


def hold_lock(run: RunDir) -> None:
    """Hold the lock of the run until this process ends, as a training would."""
    HELD.append(FolderLock(run.lock).__enter__())
