"""What each machine of a run has said about itself: the files `RUN/nodes/NAME.jsonl`, followed.

The coordinator has checked what is in them when it came, and begins each file with what the machine is. The first read
looks at the end of a machine's rows, each later one at what has been added.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.monitor.follow import FileFollower, parsed

TAIL_BYTES = 3 * 2**15
"""A machine's last rows: some 300, a quarter of an hour and more."""
MAX_HISTORY, MAX_LOG_LINES = 120, 300
LINK_FIGURES = ("waiting_part", "sent_bytes_per_second", "received_bytes_per_second", "round_trip_seconds")
"""What a worker adds to its usage."""
Line = dict[str, Any]
"""`time`, `level`, `text`; `dropped`: so many lines were left out here. `number`: of this line."""


@dataclass
class NodeRows:
    """A machine as its rows have it. `next_number` gives each usage row and each line of its log a number."""

    name: str
    path: Path
    next_number: Callable[[], int]
    heard: float | None = None
    """When its newest row of any kind was written, by the coordinator's clock."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """The newest usage row, with `phase` and what `LINK_FIGURES` names."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What its newest session said: device, processor, system, torch, cuadrilla."""
    points: deque[tuple[int, list[float | None]]] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    """Numbers, and when how busy its processor and its GPU were and how long it waited, as parts."""
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=MAX_LOG_LINES))

    def __post_init__(self) -> None:
        self._follower = FileFollower(self.path, tail_bytes=TAIL_BYTES)
        with open(self.path, "rb") as file:
            for row in parsed(file.readline()):
                self.facts = row.get("facts", {})

    def read(self) -> None:
        for row in self._follower.rows():
            self._take(row)

    @property
    def word(self) -> Line | None:
        """The newest line that it said."""
        return next((line for line in reversed(self.lines) if not line["dropped"]), None)

    def _take(self, row: Mapping[str, Any]) -> None:
        self.heard = row["time"]
        match row.get("kind"):
            case "usage":
                self.usage = {key: value for key, value in row.items() if key not in ("time", "kind")}
                gpus = [gpu["busy_percent"] for gpu in row.get("gpus", ()) if "busy_percent" in gpu]
                busy = [_part(row.get("cpu_percent")), _part(max(gpus, default=None)), row.get("waiting_part")]
                self.points.append((self.next_number(), [row["time"], *busy]))
            case "log":
                self._say(row, level=row["level"], text=row["text"])
            case "cut":
                self._say(row, level="warning", dropped=row["lines"])
            case "hello":
                self.facts = row["facts"]

    def _say(self, row: Mapping[str, Any], *, level: str, text: str = "", dropped: int = 0) -> None:
        line = {"time": row["time"], "level": level, "text": text, "dropped": dropped, "number": self.next_number()}
        self.lines.append(line)


def _part(percent: float | None) -> float | None:
    return None if percent is None else round(percent / 100, 3)
