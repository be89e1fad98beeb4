"""A strategy of one file: H steps of any optimizer on each worker, then the mean of their weights by tokens.

    worker:  from θ(v), for each step of its lease: θ ← step(θ, mean gradient);  contribution = θ − θ(v)
    merge:   θ(v + 1) = θ(v) + Σ tokens · contribution / Σ tokens

It proves the seam (`cuadrilla/sync/strategy.py`): leases of many steps, differences of weights, number types of its own
on the wire. With one plain gradient step for a lease it is the exact strategy. An optimizer's state is as old as its
lease, so nothing of it is lost when a worker is.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cuadrilla.link.base import Lease, Tensors
from cuadrilla.sync import strategy as seam
from cuadrilla.sync.events import Answer
from cuadrilla.sync.work import Rounds, Share


@dataclass(frozen=True, kw_only=True)
class Average:
    """`wire`: in which numbers a difference travels."""

    steps: int = 1
    wire: torch.dtype = torch.float32
    moves_weights: bool = True

    def worker(self, model: nn.Module, recipe: seam.Recipe) -> "AverageWorker":
        return AverageWorker(model, recipe, wire=self.wire)

    def merge(self, model: nn.Module, recipe: seam.Recipe) -> "AverageMerge":
        return AverageMerge(model, recipe)

    def rounds(self, *, share: Share) -> Rounds:
        return Rounds(share=share, steps=self.steps)

    def versions_like(self, model: nn.Module, recipe: seam.Recipe) -> Sequence[Tensors]:
        return ({**seam.trainable(model)},)

    def contributions_like(self, model: nn.Module, recipe: seam.Recipe) -> Sequence[Tensors]:
        return ({name: parameter.to(self.wire) for name, parameter in seam.trainable(model).items()},)


class AverageWorker:
    one_unit_per_micro_step = False

    def __init__(self, model: nn.Module, recipe: seam.Recipe, *, wire: torch.dtype) -> None:
        self.params: seam.Parameters = seam.trainable(model)
        self._recipe, self._wire = recipe, wire
        self._base = {name: parameter.detach().clone() for name, parameter in self.params.items()}

    @torch.no_grad()
    def begin(self, lease: Lease) -> None:
        for name, parameter in self.params.items():
            parameter.copy_(self._base[name])
            parameter.grad = None
        self._optimizer = self._recipe.make_optimizer(self.params)
        self._factor = self._recipe.lr_factor(lease.version + lease.steps)
        self._planned, self._counted = lease.planned_tokens, 0

    def collecting_statistics(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_micro_step(self, sums: seam.Sums) -> None:
        """Gradients add up by themselves."""

    def local_step(self, sums: seam.Sums) -> None:
        for parameter in self.params.values():
            if parameter.grad is not None:
                parameter.grad.mul_(self._planned / max(sums.tokens - self._counted, 1))
        if self._recipe.clip_norm:
            nn.utils.clip_grad_norm_(self.params.values(), self._recipe.clip_norm)
        self._optimizer.step(self._factor)
        self._counted = sums.tokens
        for parameter in self.params.values():
            parameter.grad = None

    def contribute(self) -> Tensors:
        return {name: (p.detach() - self._base[name]).to(self._wire) for name, p in self.params.items()}

    @torch.no_grad()
    def apply(self, version: Mapping[str, Tensor]) -> None:
        for name, base in self._base.items():
            base.copy_(version[name])
            self.params[name].copy_(base)


class AverageMerge:
    def __init__(self, model: nn.Module, recipe: seam.Recipe) -> None:
        self._params, self._recipe = seam.trainable(model), recipe
        self._mean: dict[str, Tensor] = {}

    def version(self, *, steps: int) -> Mapping[str, Tensor]:
        return self._params

    def reduce(self, answers: Sequence[Answer], *, planned_tokens: int) -> seam.Reduced:
        contributions = [answer.contribution for answer in answers]
        tokens = sum(item.tokens for item in contributions)
        self._mean = {
            name: sum((item.tensors[name].float() * (item.tokens / tokens) for item in contributions), torch.zeros(()))
            for name in self._params
        }
        norm = float(nn.utils.get_total_norm(self._mean.values()))
        bad = seam.unusable(answers, norm=norm, norms=lambda: self.norms(answers))
        return seam.Reduced(norm=norm, bad=bad)

    def norms(self, answers: Sequence[Answer]) -> list[float]:
        return [
            float(nn.utils.get_total_norm([tensor.double() for tensor in item.tensors.values()]))
            if item.tokens
            else 0.0
            for item in (answer.contribution for answer in answers)
        ]

    def without_effect(self, answers: Sequence[Answer]) -> tuple[int, ...]:
        return seam.without_effect(answers, names=list(self._params))

    def is_plausible(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        return True

    def update(self) -> Mapping[str, Tensor]:
        return self._mean

    def load_update(self, update: Mapping[str, Tensor], *, steps: int) -> None:
        self._mean = dict(update)

    @torch.no_grad()
    def step(self, *, norm: float, version: int, steps: int) -> float:
        for name, parameter in self._params.items():
            parameter.add_(self._mean[name])
        return self._recipe.lr_factor(version)

    def state_tensors(self) -> dict[str, Tensor]:
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        assert not tensors
