"""The worker half of windows (local SGD): several optimizer steps on each machine, then one merge (`merge.py`).

    start from the state of record; for each step of the lease: θ ← step(θ, mean gradient)            `local_step`
    contribution = (θ − θ of record, optimizer state), or for adaptive parameters, whose steps the merge takes,
                   (Σ gradient / planned tokens, Σ its square)                                        `contribute`

A round is a window of `steps` optimizer steps of the whole crew. A worker's lease is its lane: in each step as many
units as its speed allows. So all lanes take the same number of steps, always from the window's start, and a mean by
tokens weighs every unit alike. Learning rates depend only on the number of the run's step.

A worker keeps nothing between two leases: a newcomer starts with everything, and any worker can compute a lost lane.
This also learns best (docs/experiments.md): with momentum of its own, or with none, a lane would first have to find its
direction.

A lane that is the whole window is training alone: it contributes changes and state of all parameters, and the merge
adopts them. Each step of the run may then be several smaller ones, with the batch that suits one machine.

Adaptive parameters are those of AdamW, whose steps have the same size however small the gradient is. Merging such
steps has two faults. A parameter that only one lane sees, such as a rare token's row, would move by only that lane's
part of a step. And the squares of a small lane's noisy gradients would slow down every lane. Summed gradients have
neither fault, and their squares are as noisy as those of the whole step.

On the wire most numbers have 8 bits (`compact.py`) and weights 16. Rounding errors do not add up, and no worker has to
remember them, because a lane contributes the difference to the rounded weights it started from. With 32 bits and one
step of plain gradient descent the result is that of the exact strategy.

*Strict*: lanes are cut before it is known which worker computes them (`work.py`), a pass is a unit, and the merge adds
lanes in their order. The weights then have one SHA-256 for any number of workers and any faults.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cuadrilla.errors import TaskError
from cuadrilla.link.base import Lease, Tensors
from cuadrilla.sync.compact import compacted, expanded, names_of
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.sync.statistics import statistics_of
from cuadrilla.sync.strategy import GRADIENT, SQUARE, STATE, Forms, Parameters, Recipe, Stepper, Sums, trainable


class WindowsWorker(ExactWorker):
    """The worker half, also of exact steps: a version without optimizer state begins one. It has an optimizer only in
    windows. Raises TaskError for a model with running statistics, which are no weights.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, *, strict: bool = False, bits: int = 8) -> None:
        if statistics_of(model):
            raise TaskError(
                "windows do not merge the running statistics of BatchNorm",
                hint='sync.kind = "exact" does; or a model with LayerNorm or GroupNorm',
            )
        super().__init__(model)
        self.one_unit_per_micro_step = strict
        self._recipe, self._bits = recipe, bits
        self._optimizer: Stepper | None = None
        self._record: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._lease: Lease | None = None
        self._counted = self._steps = 0

    @torch.no_grad()
    def begin(self, lease: Lease) -> None:
        """Start a lease from the state of record, whatever was computed before."""
        if self._optimizer is None:
            super().begin(lease)
            return
        for name, parameter in self.params.items():
            parameter.copy_(self._record[name])
            parameter.grad = None
        self._optimizer.load_state_tensors(state_in(self._record))
        self._totals = {} if lease.whole else _zero_totals(self.params, self._optimizer)
        self._lease = lease
        self._counted = self._steps = 0

    @torch.no_grad()
    def local_step(self, sums: Sums) -> None:
        """Take one optimizer step with this lane's mean gradient; no step if its passes held no token."""
        if self._optimizer is None:  # an exact step
            return
        lease = self._lease
        assert lease is not None, "begin first"
        self._steps += 1
        tokens, self._counted = sums.tokens - self._counted, sums.tokens
        if not tokens:
            return
        for parameter in self.params.values():
            if parameter.grad is not None:
                parameter.grad.mul_(lease.planned_tokens / tokens)
        norm = nn.utils.clip_grad_norm_(self.params.values(), self._recipe.clip_norm or float("inf"))
        sums.valid = sums.valid and bool(torch.isfinite(norm))
        part = tokens / lease.planned_tokens
        for name, parameter in self.params.items():
            if GRADIENT + name in self._totals and (gradient := parameter.grad) is not None:
                self._totals[GRADIENT + name].add_(gradient, alpha=part)
                self._totals[SQUARE + name].addcmul_(gradient, gradient, value=part * part * lease.steps)
        self._optimizer.step(self._recipe.lr_factor(lease.version + self._steps / lease.parts))
        for parameter in self.params.values():
            parameter.grad = None

    def contribute(self) -> Tensors:
        """The tensors of the contribution. No later lease writes into them."""
        if self._optimizer is None:
            return super().contribute()
        changes = {name: parameter.detach() - self._record[name] for name, parameter in self.params.items()}
        return _contribution(changes, self._optimizer, totals=self._totals, bits=self._bits)

    def apply(self, version: Mapping[str, Tensor]) -> None:
        """Load a committed version. Before a window the model's parameters are set from it when a lease begins."""
        if not state_in(version):
            self._optimizer, self._record, self._totals = None, {}, {}
            super().apply(version)
            return
        self._optimizer = self._optimizer or self._recipe.make_optimizer(self.params)
        device = next(iter(self.params.values())).device
        self._record = {name: expanded(version, name).detach().to(device, copy=True) for name in names_of(version)}


def window_forms(model: nn.Module, recipe: Recipe, *, bits: int) -> Forms:
    """A version: trainable parameters and optimizer state. A contribution: that of a lane, and with adaptive parameters
    also that of a lane that is the whole window.
    """
    params = {name: nn.Parameter(torch.empty_like(p, device="meta")) for name, p in trainable(model).items()}
    optimizer = recipe.make_optimizer(params)
    totals = _zero_totals(params, optimizer)
    return Forms(
        version=window_version(params, optimizer, bits=bits),
        contributions=[
            _contribution(params, optimizer, totals=each, bits=bits) for each in ((totals, {}) if totals else ({},))
        ],
    )


def window_version(params: Mapping[str, Tensor], optimizer: Stepper, *, bits: int) -> dict[str, Tensor]:
    """The state of record in its form for the wire; with 32 bits the tensors themselves."""
    return compacted({**params, **_named(optimizer.state_tensors())}, bits=bits, halves=params.keys())


def _contribution(
    changes: Mapping[str, Tensor], optimizer: Stepper, *, totals: Mapping[str, Tensor], bits: int
) -> dict[str, Tensor]:
    """These totals of gradients and squares; changes and optimizer state of all other parameters."""
    changes = {name: change for name, change in changes.items() if GRADIENT + name not in totals}
    state = {name: t for name, t in optimizer.state_tensors().items() if name.partition(".")[2] in changes}
    return compacted({**changes, **_named(state), **totals}, bits=bits)


def _zero_totals(params: Parameters, optimizer: Stepper) -> dict[str, Tensor]:
    """Totals of the gradients of adaptive parameters, and of their squares, at the start of a lease."""
    adaptive = {name: parameter for name, parameter in params.items() if name in optimizer.adaptive}
    return {prefix + name: torch.zeros_like(p) for prefix in (GRADIENT, SQUARE) for name, p in adaptive.items()}


def _named(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {STATE + name: tensor for name, tensor in state.items()}


def state_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state among these tensors, by its names in `Stepper.state_tensors`."""
    return {name.removeprefix(STATE): tensor for name, tensor in tensors.items() if name.startswith(STATE)}
