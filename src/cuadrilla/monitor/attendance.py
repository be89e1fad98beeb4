"""Who works in a run now, and how much of it: what `cuadrilla nodes` adds to the list of machines.

The run's events say who came and went; the rows of its newest steps say what each one computed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuadrilla.monitor.report import mean_shares

NEWEST = 20
"""Steps to look at: one alone deals out so few units that its shares say little."""


@dataclass(frozen=True, kw_only=True)
class AtWork:
    """`share`: a machine's part of the newest steps. `tokens_per_second`: its part of the crew's speed in them."""

    share: float
    tokens_per_second: float


def at_work(happened: Iterable[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, AtWork]:
    """By name, of those who are here. `rows`: the newest steps."""
    here = present(happened)
    told = [row["shares"] for row in rows if isinstance(row.get("shares"), dict)]
    if len(here) == 1:
        told = [dict.fromkeys(here, 1.0)]  # a step of one worker names nobody
    shares = mean_shares([{"shares": each} for each in told]) if told else {}
    speeds = [float(row.get("tokens_per_second") or 0) for row in rows]
    speed = sum(speeds) / len(speeds) if speeds else 0.0
    return {
        name: AtWork(share=shares.get(name, 0.0), tokens_per_second=shares.get(name, 0.0) * speed)
        for name in sorted(here)
    }


def present(happened: Iterable[Mapping[str, Any]]) -> set[str]:
    """Names of those who joined and did not leave; nobody is in a run that has finished."""
    here: set[str] = set()
    for event in happened:
        match event.get("event"):
            case "joined":
                here.add(str(event.get("worker")))
            case "left" | "evicted":
                here.discard(str(event.get("worker")))
            case "finished":
                here.clear()
    return here
