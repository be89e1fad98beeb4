"""A strategy of one file that never waits for its line: the next lease is computed while the answer travels, in pieces.

    worker:  θ goes on from where it is; contribution = θ(end of the lease) − θ(its beginning), half of it sent ahead;
             a version that holds round r, once it is there:  θ ← θ(version) + θ − θ(end of r)
    merge:   that of tests/average.py
    rounds:  the next round is leased while the one before is under way, and none beyond

So one worker alone is the strategy of tests/average.py, and what a worker does late or in vain is taken back, not more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cuadrilla.link.base import Lease, Tensors
from cuadrilla.sync import strategy as seam
from cuadrilla.sync.events import Action, Merge, Merged
from cuadrilla.sync.ledger import Grant
from cuadrilla.sync.work import Rounds, Share, WholeRounds, Work
from tests.average import Average, AverageWorker

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class StreamingAverage(Average):
    max_staleness: int | None = 1

    def worker(self, model: nn.Module, recipe: seam.Recipe) -> "StreamingWorker":
        return StreamingWorker(model, recipe, units_per_step=self.units_per_step, wire=self.wire)

    def rounds(self, *, share: Share) -> Rounds:
        return RoundsAhead(share=share)


class StreamingWorker(AverageWorker):
    """`_base` is where the lease at hand began; `_ends` where leases ended whose round is in no version yet."""

    def __init__(self, model: nn.Module, recipe: seam.Recipe, *, units_per_step: int, wire: torch.dtype) -> None:
        super().__init__(model, recipe, units_per_step=units_per_step, wire=wire)
        self._ends: dict[int, Weights] = {}
        self._version: Weights | None = None

    @torch.no_grad()
    def begin(self, lease: Lease) -> None:
        if self._version is not None:
            merged = [number for number in sorted(self._ends) if number < lease.version]
            end = [self._ends.pop(number) for number in merged][-1] if merged else None
            for name, base in self._base.items():
                going_on = base - end[name] if end is not None else 0
                base.copy_(self._version[name] + going_on)
            self._version = None
        self._round = lease.units[0] // self._recipe.units_per_round
        super().begin(lease)
        self._factor = self._recipe.lr_factor((self._round + 1) * lease.planned_tokens)

    def piece(self, lease: Lease) -> Tensors:
        """The first half, after each step: those of the last step count."""
        return dict(list(self._change().items())[: len(self.params) // 2])

    @torch.no_grad()
    def contribute(self) -> Tensors:
        rest = dict(list(self._change().items())[len(self.params) // 2 :])
        self._ends[self._round] = {name: parameter.detach().clone() for name, parameter in self.params.items()}
        for name, base in self._base.items():
            base.copy_(self.params[name])
        return rest

    def _change(self) -> Weights:
        return {name: (p.detach() - self._base[name]).to(self._wire) for name, p in self.params.items()}

    def apply(self, version: Mapping[str, Tensor]) -> None:
        """At the next lease, which says which version it is."""
        self._version = {name: tensor.detach().clone() for name, tensor in version.items()}


@dataclass(frozen=True, kw_only=True)
class RoundsAhead(WholeRounds):
    def deal(self, work: Work) -> list[Action]:
        """To each member that computes nothing its share of the oldest round of which it has none yet."""
        if not work.crew.note_quorum():
            return []
        actions: list[Action] = []
        for number in range(work.version, min(work.version + 2, work.rules.num_versions)):
            size = work.rules.units_per_round
            if work.ledger.opened < (number + 1) * size:
                work.ledger.open_units(size)
            shares, others = self.share(size, paces=work.crew.paces()), set(work.crew.members)
            taken = {worker for grant in _grants(work) if grant.units[0] // size == number for worker in [grant.worker]}
            for worker in work.ready():
                if worker in taken and (others - taken or number > work.version):
                    continue
                elsewhere = {unit for unit in work.ledger.free if unit // size != number}
                count = 1 if work.failures.keys() & work.ledger.free else max(1, shares[worker])
                actions.extend(work.grant(worker, count, exclude=elsewhere | work.failed_by(worker)))
                taken.add(worker)
        if work.ready() and work.ledger.free and not work.ledger.leases:  # all of them failed these units: once more
            actions.extend(work.grant(work.ready()[0], 1))
        return actions

    def due(self, work: Work) -> Merge | None:
        size = work.rules.units_per_round
        units = range(work.version * size, (work.version + 1) * size)
        if work.ledger.opened < units.stop or not work.ledger.uncounted.isdisjoint(units):
            return None
        return work.merge(of=units)

    def next(self, work: Work, event: Merged) -> list[Action]:
        del event
        return [work.tell_version(worker) for worker in work.crew.members]


def _grants(work: Work) -> list[Grant]:
    return [*work.ledger.leases.values(), *(answer.grant for answer in work.answers.values())]
