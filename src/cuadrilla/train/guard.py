"""The guard against diverging: judges each merged update by its loss and gradient norm, before it is applied.

It keeps the running mean and variance (exponential, memory of about 50 updates) of the loss and of the logarithm of the
norm. An update with a value more than `spike_sigmas` above the mean is skipped, and does not enter the mean. A standard
deviation is at least a fiftieth of the loss, or a quarter of the norm. So with 6 sigmas a spike is at least 12 % more
loss, or four times the norm. Smaller ones are not skipped: small batches of a small text hold harder passages, and for
larger gradients clipping is enough. After three skips in fifty updates the run goes back to the last checkpoint and
passes over the data in between. After `rollbacks` of those it gives up, exit 7.
Pure: state in, verdict out; the state is saved in the checkpoint. Evidence: PaLM section 5.1, OLMo 2.
"""

import enum
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from cuadrilla.config import GuardSection

MEMORY = 0.98
WARM_UP_UPDATES = 30
SKIPS_BEFORE_ROLLBACK = 3
WINDOW_UPDATES = 50
MIN_SIGMA = 0.02
"""Smallest standard deviation of the loss, in nats; as a part of the mean where that is above 1."""
MIN_LOG_NORM_SIGMA = 0.23


class Verdict(enum.Enum):
    OK = "ok"
    SKIP = "skip"
    ROLL_BACK = "roll back"
    GIVE_UP = "give up"


@dataclass(kw_only=True)
class Running:
    """Exponential mean and variance with the correction for a short history."""

    mean: float = 0.0
    variance: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = MEMORY * self.weight + (1 - MEMORY)
        step = (1 - MEMORY) / self.weight
        difference = value - self.mean
        self.mean += step * difference
        self.variance = (1 - step) * (self.variance + step * difference * difference)

    def sigmas(self, value: float, *, least: float) -> float:
        """Number of standard deviations that `value` lies above the mean. A deviation counts as at least `least`."""
        return (value - self.mean) / max(math.sqrt(self.variance), least)


@dataclass(kw_only=True)
class Guard:
    section: GuardSection
    updates: int = 0
    skips: list[int] = field(default_factory=list)
    rollbacks: int = 0
    loss: Running = field(default_factory=Running)
    log_norm: Running = field(default_factory=Running)

    def doubts(self, *, loss: float, norm: float) -> bool:
        """Whether to examine an update's contributions: it is a spike, or it is too early to tell. Changes nothing."""
        return self.updates < WARM_UP_UPDATES or self._is_spike(loss, _log(norm))

    def judge(self, *, loss: float, norm: float) -> Verdict:
        """Verdict on a merged update, finite or not. Called once for each."""
        self.updates += 1
        if not self._is_spike(loss, _log(norm)):
            self.loss.add(loss)
            self.log_norm.add(_log(norm))
            return Verdict.OK
        self.skips = [update for update in self.skips if update > self.updates - WINDOW_UPDATES] + [self.updates]
        if len(self.skips) < SKIPS_BEFORE_ROLLBACK:
            return Verdict.SKIP
        self.skips.clear()
        if self.rollbacks >= self.section.rollbacks:
            return Verdict.GIVE_UP
        self.rollbacks += 1
        return Verdict.ROLL_BACK

    def _is_spike(self, loss: float, log_norm: float) -> bool:
        if not (math.isfinite(loss) and math.isfinite(log_norm)):
            return True
        if self.updates <= WARM_UP_UPDATES or not self.section.spike_sigmas:
            return False
        limit = self.section.spike_sigmas
        least = MIN_SIGMA * max(1.0, abs(self.loss.mean))
        return (
            self.loss.sigmas(loss, least=least) > limit
            or self.log_norm.sigmas(log_norm, least=MIN_LOG_NORM_SIGMA) > limit
        )

    def state(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "section"}

    def load_state(self, state: dict[str, Any]) -> None:
        self.updates, self.skips, self.rollbacks = state["updates"], list(state["skips"]), state["rollbacks"]
        self.loss, self.log_norm = Running(**state["loss"]), Running(**state["log_norm"])


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30)) if math.isfinite(norm) else math.inf
