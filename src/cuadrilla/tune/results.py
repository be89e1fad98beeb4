"""The result of a trial's run: its score, and the figures that constraints look at. Reads run directories only."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cuadrilla.config import TuneSection
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, last_rows
from cuadrilla.tune.search import TrialResult

USUAL_METRICS = ("val_bits_per_byte", "val_loss")
RATE = "tokens_per_second"


def read_found(
    run: RunDir, section: TuneSection, *, from_step: int, seconds: float, place: str, num_parameters: int
) -> TrialResult:
    """The result of a complete run. `from_step`: where this job began, after the steps of a shorter run."""
    rows = last_rows(run.metrics)
    name = section.metric or next((name for name in USUAL_METRICS if any(name in row for row in rows)), "")
    scores = [float(row[name]) for row in rows if _is_number(row.get(name))]
    if not scores:
        known = ", ".join(sorted({key for row in rows for key in row if _is_number(row[key])}))
        reason = Message("no step has {name}; there are {known}", name=name or "val_loss", known=known)
        return TrialResult(score=None, seconds=seconds, place=place, reason=reason)
    score = max(scores) if section.maximize else min(scores)
    figures = {**_figures(rows), "parameters": float(num_parameters), "seconds": seconds}
    return TrialResult(score=score, figures=figures, tokens=_tokens(rows, from_step), seconds=seconds, place=place)


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of each, and the median speed."""
    last = {key: float(value) for row in rows for key, value in row.items() if _is_number(value)}
    rates = [float(row[RATE]) for row in rows if _is_number(row.get(RATE))]
    return {**last, **({RATE: statistics.median(rates)} if rates else {})}


def _tokens(rows: Sequence[Mapping[str, Any]], from_step: int) -> int:
    at = {int(row["version"]): int(row["tokens"]) for row in rows if _is_number(row.get("tokens"))}
    return max(at.values(), default=0) - at.get(from_step, 0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
