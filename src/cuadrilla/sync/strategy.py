"""The words that all strategies share. A strategy (`kinds.py`), which `sync.kind` chooses, has three parts:

    worker half   the passes of a lease → a contribution        on every worker, with the worker's own model
    merge half    contributions → an update → the next version  on the coordinator, with the model of record
    rounds        which worker gets which units, when to merge  on the coordinator (`work.py`)

"Of record" is the coordinator's state, from which versions and checkpoints are made. A strategy runs no passes (the
training loop does) and sends nothing (the link does). A lease may hold many optimizer steps (`Lease.steps`).
Contributions and versions are named tensors: sums of gradients, changes of weights, an optimizer's state. The prefix of
a name says which; a weight, its change and a running statistic have none.

Invariant: a contribution depends only on the last version applied and on the units of its lease. A worker half keeps
nothing else, so any worker can compute any lease again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from cuadrilla.link.base import Tensors

STATE, GRADIENT, SQUARE = "optimizer state: ", "gradient: ", "squared gradient: "
"""Name prefixes of tensors. Gradients and squares are sums, divided by the planned tokens."""
SQUARES = (SQUARE, f"{STATE}exp_avg_sq.")
"""Name prefixes of squared gradients and their means."""

Parameters = Mapping[str, nn.Parameter]


class Stepper(Protocol):
    """The part of an optimizer that strategies use."""

    @property
    def adaptive(self) -> frozenset[str]:
        """Names of the parameters whose steps are divided by the root of a mean of squared gradients (AdamW)."""

    def step(self, factor: float, *, squares: Mapping[str, Tensor] | None = None) -> None:
        """Update the parameters that have a `.grad`; `factor` multiplies every learning rate. `squares`: for each
        parameter in `adaptive` the squared gradient, if it is not the square of `.grad`.
        """

    def state_tensors(self) -> dict[str, Tensor]: ...

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How parameters are updated, by the worker half or the merge half. It is the same on all machines.

    Made from the sections `optim` and `schedule` (`train/setup.py`). `lr_factor(step)` multiplies every learning rate;
    the steps of a run count from 1. `clip_norm`: the largest global gradient norm; 0 does not clip.
    """

    make_optimizer: Callable[[Parameters], Stepper]
    lr_factor: Callable[[float], float]
    clip_norm: float


@dataclass(frozen=True, kw_only=True)
class Forms:
    """Tensors like those of a version, and like those of each contribution that may come to it: equal in names, dtypes
    and shapes. Their values mean nothing.
    """

    version: Tensors
    contributions: Sequence[Tensors]


@dataclass(kw_only=True)
class Sums:
    """A worker's sums over its lease: the loss, the counted tokens, and whether every value was finite."""

    loss: float = 0.0
    tokens: int = 0
    valid: bool = True


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name. Frozen parameters (`requires_grad` False) are never sent or changed."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
