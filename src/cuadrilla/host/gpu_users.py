"""Who uses the GPUs of this machine: how busy each card is, and which processes make it so, where the driver says that.

NVIDIA's library tells a part of the time for each process, except under WSL2 and on parts of a card (MIG); in a
container its process numbers are the host's. An Apple GPU, and `nvidia-smi`, tell how busy a card is altogether.
`others_on` decides what of it belongs to others and is pure. As for all that is asked of a driver: never raises, and
waits for no longer than the limits of `host/gpus.py`.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cuadrilla.host.facts import read_facts
from cuadrilla.host.gpus import NVML_CHILD, RETRY_SECONDS, GpuSampler, NvmlChild, bounded, count, has_driver

MOST_PROCESSES = 1000
MOST_PID = 2**32
TOTALS_SECONDS = 6.0
"""`nvidia-smi` takes a second of a processor: it is not asked at each look."""
USERS = b"users"


@dataclass(frozen=True, kw_only=True)
class CardUse:
    """Parts of the time, 0 to 1. `busy`: of all together; `users`: by process, None where that is not told."""

    busy: float | None = None
    users: Mapping[int, float] | None = None


def parse_uses(rows: object) -> tuple[CardUse, ...]:
    """What the child has answered; what cannot be is not known."""
    cards = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, Mapping):
            continue
        told = row.get("users")
        users = None
        if isinstance(told, list):
            pairs = [each for each in told[:MOST_PROCESSES] if isinstance(each, list) and len(each) == 2]
            numbers = [(count(pid, most=MOST_PID), bounded(part, most=100.0)) for pid, part in pairs]
            users = {pid: part / 100 for pid, part in numbers if pid is not None and part is not None}
        cards.append(CardUse(busy=_part(row.get("busy_percent")), users=users))
    return tuple(cards)


def _part(percent: object) -> float | None:
    found = bounded(percent, most=100.0)
    return None if found is None else found / 100


def others_on(
    cards: Sequence[CardUse], *, ours: Collection[int], told_apart: bool, all_are_others: bool
) -> float | None:
    """Part of the card that others use most; None where nothing is known of any card.

    `told_apart`: the numbers of processes are this machine's. `all_are_others`: none of ours computes at the moment.
    """
    found = []
    for card in cards:
        if card.users is not None and told_apart:
            found.append(min(1.0, sum(part for pid, part in card.users.items() if pid not in ours)))
        elif card.busy is not None and all_are_others:
            found.append(card.busy)
    return max(found, default=None)


def sees_all_programs() -> bool:
    """Whether the driver's process numbers are those of this system: in a container they are its host's."""
    return not read_facts().container


class GpuWatch:
    """Looks at the GPUs now and then. `argv`, `nvml_argv`: as of `GpuSampler`."""

    def __init__(self, *, argv: Sequence[str] | None = None, nvml_argv: Sequence[str] | None = None) -> None:
        self._argv, self._nvml_argv = argv, nvml_argv
        self._nvml: NvmlChild | None = None
        self._totals: GpuSampler | None = None
        self._pause_until = self._totals_until = 0.0
        self._last: tuple[CardUse, ...] = ()

    def look(self, *, works: bool) -> tuple[CardUse, ...]:
        """Each card; () without any. While this process `works`, nobody asks how busy a card is altogether."""
        if (cards := self._users()) is not None:
            self._last = cards
        elif works:
            self._last = tuple(CardUse() for _ in self._last)
        elif time.monotonic() >= self._totals_until:
            self._totals = self._totals or GpuSampler(argv=self._argv, nvml_argv=())
            self._last = tuple(CardUse(busy=_part(gpu.busy_percent)) for gpu in self._totals.sample())
            self._totals_until = time.monotonic() + TOTALS_SECONDS
        return self._last

    def close(self) -> None:
        """End the child process; another look starts another one. From any thread."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.close()

    def _users(self) -> tuple[CardUse, ...] | None:
        """As the library tells; None where it is not, or does not answer."""
        argv = self._nvml_argv if self._nvml_argv is not None else NVML_CHILD if has_driver() else ()
        if not argv or time.monotonic() < self._pause_until:
            return None
        self._nvml = nvml = self._nvml or NvmlChild(argv)
        rows = nvml.rows(USERS)
        if rows is None:
            self._pause_until = time.monotonic() + RETRY_SECONDS
            return None
        return parse_uses(rows)
