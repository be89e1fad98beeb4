"""The outer optimizer: a Nesterov step on the change of `every` inner steps.

    Δ = anchor − θ;  u ← μ u + Δ;  θ ← anchor − η (Δ + μ u);  anchor ← θ

With one worker this is SNOO / MuLoCo with K = 1 (arXiv 2510.15830, 2505.23725); with several it is the outer step of
DiLoCo (arXiv 2311.08105). With η = 1 and μ = 0 it changes nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Outer:
    """Holds anchor and momentum, both shaped like the parameters."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, every: int, lr: float, momentum: float) -> None:
        assert every > 0
        self._every = every
        self._lr = lr
        self._momentum = momentum
        self._anchor = {name: parameter.detach().clone() for name, parameter in params.items()}
        self._velocity = {name: torch.zeros_like(parameter) for name, parameter in self._anchor.items()}

    def due(self, version: int) -> bool:
        return version % self._every == 0

    @torch.no_grad()
    def after_step(self, params: Mapping[str, nn.Parameter], *, version: int) -> None:
        """Called after each inner step with the version it makes."""
        if not self.due(version):
            return
        for name, parameter in params.items():
            anchor, velocity = self._anchor[name], self._velocity[name]
            change = anchor - parameter
            velocity.mul_(self._momentum).add_(change)
            anchor.sub_(change.add_(velocity, alpha=self._momentum), alpha=self._lr)
            parameter.copy_(anchor)

    def state_tensors(self) -> dict[str, Tensor]:
        return {f"{kind}.{name}": t for kind, group in self._groups().items() for name, t in group.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for kind, group in self._groups().items():
            for name, tensor in group.items():
                tensor.copy_(tensors[f"{kind}.{name}"])

    def _groups(self) -> dict[str, dict[str, Tensor]]:
        return {"anchor": self._anchor, "velocity": self._velocity}
