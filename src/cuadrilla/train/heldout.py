"""Held-out loss over a run: when it was lowest, how long it has not fallen, whether the data is learnt by heart.

A model that sees little data many times goes on to know it better, and all other data worse. Pure: rows in.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MEMORISES_AFTER = 2
"""Evaluations above the lowest in a row; one may be chance."""
MEMORISES_RISE = 0.005
"""Above the lowest, as a part of it: a run whose learning rate has come down to nothing stays where it is."""


@dataclass(kw_only=True)
class HeldOut:
    """Fed with every committed row. `best`: (held-out loss, version) of the lowest so far."""

    best: tuple[float, int] | None = None
    since_best: int = 0
    """Evaluations since then."""
    last: float = math.nan
    """Held-out loss of the newest evaluation."""
    train_at_best: float = math.nan
    """Mean training loss of the steps between the evaluation before the best one and that."""
    train_last: float = math.nan
    _losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], *, upto: int) -> "HeldOut":
        """As it was when version `upto` was committed, from the rows of a run."""
        held_out = cls()
        for row in rows:
            if isinstance(row.get("version"), int) and row["version"] <= upto:
                held_out.add(row, version=row["version"])
        return held_out

    def add(self, row: Mapping[str, Any], *, version: int) -> bool:
        """Whether this row's evaluation is the best so far."""
        train, held_out = row.get("loss"), row.get("val_loss")
        if isinstance(train, int | float) and math.isfinite(train):
            self._losses.append(train)
        return isinstance(held_out, int | float) and self.judge(held_out, version=version)

    def judge(self, loss: float, *, version: int) -> bool:
        """Whether this evaluation is the best so far; it may be of an earlier version than the last row."""
        self.last, self.train_last = loss, math.fsum(self._losses) / len(self._losses) if self._losses else math.nan
        self._losses.clear()
        if not math.isfinite(loss) or (self.best is not None and not loss < self.best[0]):
            self.since_best += 1
            return False
        self.best, self.since_best, self.train_at_best = (float(loss), version), 0, self.train_last
        return True

    @property
    def memorises(self) -> bool:
        """Whether held-out loss has risen while training loss fell."""
        if self.best is None or self.since_best < MEMORISES_AFTER or not self.train_last < self.train_at_best:
            return False
        return self.last - self.best[0] > MEMORISES_RISE * abs(self.best[0])
