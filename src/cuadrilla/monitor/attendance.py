"""Who works in a run, as its events tell, and how much of it: for all that shows a crew.

The run's events say who came and went; the rows of its newest steps say what each one computed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuadrilla.host.gpus import bounded
from cuadrilla.monitor.nodes import MOST_NAME, MOST_NODES, MOST_TEXT, MOST_TIME
from cuadrilla.printable import one_line

NEWEST = 20
"""Steps to look at: one alone deals out so few units that its shares say little."""
ENDS = ("finished", "failed")
"""Events after which nobody is in a run."""


@dataclass(kw_only=True)
class Attendant:
    """A machine of a run. `reason`: of its last going. `time`: when it came or went, or the run ended."""

    is_here: bool = False
    joined: int = 0
    lost: int = 0
    reason: str = ""
    time: float | None = None


@dataclass
class Attendance:
    """Of the events that it was told, in their order; of `most` machines."""

    most: int = MOST_NODES
    by_name: dict[str, Attendant] = field(default_factory=dict)
    reason: str = ""
    """Why the run has failed or stopped, if nobody has joined since."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Whatever is in it."""
        at = bounded(event.get("time"), least=1.0, most=MOST_TIME)
        worker = event.get("worker")
        match event.get("event"):
            case "joined" if attendant := self._of(worker):
                attendant.is_here, attendant.time = True, at
                attendant.joined += 1
                self.reason = ""
            case "left" | "evicted" if attendant := self._of(worker):
                attendant.is_here, attendant.time = False, at
                attendant.lost += 1
                attendant.reason = _reason(event)
            case kind if kind in ENDS:
                for attendant in self.by_name.values():
                    attendant.time = at if attendant.is_here else attendant.time
                    attendant.is_here = False
                self.reason = "" if event.get("complete") else _reason(event)

    def clear(self) -> None:
        self.by_name.clear()
        self.reason = ""

    def _of(self, worker: object) -> Attendant | None:
        if not isinstance(worker, str):
            return None
        name = one_line(worker, most=MOST_NAME)
        if name not in self.by_name and len(self.by_name) >= self.most:
            return None
        return self.by_name.setdefault(name, Attendant())

    @property
    def here(self) -> set[str]:
        """Those who joined and did not leave."""
        return {name for name, attendant in self.by_name.items() if attendant.is_here}


def _reason(event: Mapping[str, Any]) -> str:
    reason = event.get("reason")
    return one_line(reason, most=MOST_TEXT) if isinstance(reason, str) else ""


@dataclass(frozen=True, kw_only=True)
class AtWork:
    """`share`: a machine's part of the newest steps. `tokens_per_second`: its part of the crew's speed in them."""

    share: float
    tokens_per_second: float


def at_work(names: Collection[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, AtWork]:
    """Of those who are here, by name. `rows`: the newest steps."""
    told = [row["shares"] for row in rows if isinstance(row.get("shares"), dict)]
    if len(names) == 1:
        told = [dict.fromkeys(names, 1.0)]  # a step of one worker names nobody
    shares = mean_shares(told)
    speeds = [float(row.get("tokens_per_second") or 0) for row in rows]
    speed = sum(speeds) / len(speeds) if speeds else 0.0
    return {
        name: AtWork(share=shares.get(name, 0.0), tokens_per_second=shares.get(name, 0.0) * speed)
        for name in sorted(names)
    }


def mean_shares(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each worker's mean share over steps; a worker that a step does not name had none of it."""
    names = {name for shares in told for name in shares}
    return {name: sum(shares.get(name, 0.0) for shares in told) / len(told) for name in sorted(names)}
