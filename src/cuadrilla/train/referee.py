"""The coordinator computes a few leases itself: of two workers neither is the measure of the other.

    doubt   the guard finds a merged update strange, and fewer than three workers have made it: the contributions with
            the largest loss and the largest gradient per token are computed here
    audit   now and then one contribution is, whatever it looks like; its worker does not know which, nor when

Who is found to be wrong has its units computed by another, and is quarantined at the second time. An audit costs the
crew the time it takes here; the next one comes when that is `AUDIT_SHARE` of the time since. It is meant for devices
that compute something else and for workers that invent their answers; other processors, precisions and random masks of
dropout agree within `LOSS_TOLERANCE`, `NORM_RATIO` and `MIN_COSINE`, and so does a lie that is as small.
"""

import copy
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from cuadrilla.errors import CuadrillaError
from cuadrilla.link.base import Contribution, Lease, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version
from cuadrilla.messages import Message
from cuadrilla.model.task import Task
from cuadrilla.sync.strategy import WorkerHalf
from cuadrilla.train.loop import DRAWING, WorkerSettings, train

AUDIT_SHARE = 0.01
MAX_AUDIT_SECONDS = 60.0
"""Who is so slow at a lease does not audit: the crew would wait too long at once."""
LOSS_TOLERANCE = 0.3
NORM_RATIO = 3.0
MIN_COSINE = 0.3

log = logging.getLogger(__name__)

Compute = Callable[[Sequence[int]], Contribution]
"""Of units, at the weights of record."""


@dataclass(kw_only=True)
class Referee:
    """`compute` may take as long as a lease does. `secret`: decides which contributions are audited."""

    compute: Compute
    secret: random.Random
    clock: Callable[[], float] = time.monotonic
    next_audit: float | None = None

    def finds(self, said: Contribution, units: Sequence[int]) -> str:
        """In what this answer differs from what is computed here; empty if it can be right, or cannot be computed."""
        try:
            return difference(said, self.compute(units))
        except (CuadrillaError, RuntimeError, MemoryError) as error:
            reason = error.message if isinstance(error, CuadrillaError) else error
            log.warning("no more audits of contributions: this machine cannot compute a lease: %s", reason)
            self.next_audit = math.inf
            return ""

    def is_due(self, lease_seconds: float) -> bool:
        """Whether it is time for an audit. `lease_seconds`: how long a lease takes, by the coordinator's clock."""
        if self.next_audit is None:
            self._plan(lease_seconds)
        assert self.next_audit is not None
        return self.clock() >= self.next_audit

    def audit(self, said: Sequence[Contribution], units: Sequence[Sequence[int]]) -> tuple[int, str, float]:
        """One of the contributions, in what it differs ("": in nothing), and the seconds that this has taken."""
        began, index = self.clock(), self.secret.randrange(len(said))
        found = self.finds(said[index], units[index])
        seconds = self.clock() - began
        if self.next_audit != math.inf:
            self._plan(seconds)
        if seconds > MAX_AUDIT_SECONDS:
            log.warning("no more audits of contributions: one takes %.0f s on this machine", seconds)
            self.next_audit = math.inf
        return index, found, seconds

    def _plan(self, seconds: float) -> None:
        self.next_audit = self.clock() + seconds / AUDIT_SHARE * self.secret.uniform(1.0, 2.0)


def difference(said: Contribution, computed: Contribution) -> str:
    """In what an answer is beyond what another machine would compute from the same units and weights."""
    if said.tokens != computed.tokens:
        return Message("{said} tokens instead of {computed}", said=said.tokens, computed=computed.tokens)
    if abs(said.loss_sum - computed.loss_sum) > LOSS_TOLERANCE * max(abs(said.loss_sum), abs(computed.loss_sum)):
        return Message("a loss of {said:.3g} instead of {computed:.3g}", said=said.loss_sum, computed=computed.loss_sum)
    theirs, ours, product = _products(said.tensors, computed.tensors)
    if not theirs and not ours:
        return ""
    if not ours / NORM_RATIO <= theirs <= ours * NORM_RATIO:
        return Message("a gradient of norm {said:.3g} instead of {computed:.3g}", said=theirs, computed=ours)
    cosine = product / (theirs * ours)
    if cosine >= MIN_COSINE:
        return ""
    return Message("a gradient in another direction (cosine {cosine:.2f})", cosine=cosine)


def _products(theirs: Tensors, ours: Tensors) -> tuple[float, float, float]:
    """Norms of two contributions' tensors, and their scalar product."""
    sums = torch.zeros(3, dtype=torch.float64)
    for name, tensor in ours.items():
        a, b = theirs[name].detach().cpu().double().flatten(), tensor.detach().cpu().double().flatten()
        sums += torch.stack([a @ a, b @ b, a @ b])
    squares_a, squares_b, product = sums.tolist()
    return math.sqrt(squares_a), math.sqrt(squares_b), product


class OneLease:
    """A link that leads a worker through one lease, from the weights of record, and keeps its answer."""

    def __init__(self, weights: Tensors, lease: Lease) -> None:
        self._events: list[ToWorker] = [Version(version=lease.version, parameters=weights), lease, Stop(reason="")]
        self.answer: Contribution | None = None
        self._pieces: Tensors = {}

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            self.answer = replace(message, tensors={**self._pieces, **message.tensors})

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        del lease_id  # there is one
        self._pieces = {**self._pieces, **piece}

    def next_event(self) -> ToWorker:
        return self._events.pop(0)

    def interrupted(self) -> bool:
        return False

    def download(self, ref: TensorRef) -> Tensors:
        return ref  # type: ignore[return-value]

    def close(self) -> None:
        pass


def computes(
    task: Task,
    model: nn.Module,
    *,
    weights: Callable[[], Tensors],
    worker: WorkerSettings,
    sync: Callable[[nn.Module], WorkerHalf],
    version: Callable[[], int],
    planned: int,
) -> Compute:
    """What a worker with these settings answers to a lease. `model` is copied for each, and stays as it is."""

    def compute(units: Sequence[int]) -> Contribution:
        own = copy.deepcopy(model)
        link = OneLease(weights(), Lease(lease_id=0, version=version(), units=tuple(units), planned_tokens=planned))
        with DRAWING, torch.random.fork_rng():
            train(link, task=task, model=own, sync=sync(own), worker=worker)
        assert link.answer is not None
        return link.answer

    return compute
