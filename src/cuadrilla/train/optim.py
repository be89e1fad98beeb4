"""Optimizers behind one small interface: Muon for the matrices inside the model, fused AdamW for the rest; or AdamW
or SGD for everything.

Muon: https://kellerjordan.github.io/posts/muon/. `torch.optim.Muon` orthogonalises one matrix after the other, in bf16,
where a difference in the last fp32 bit of a gradient can become one of 2^-8. `Muon` here takes all matrices of one
shape at once, in fp32 if the passes are. State travels as named tensors ("exp_avg.NAME", "momentum_buffer.NAME",
"step.NAME"), never as pickled objects.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from cuadrilla.config import AdamWSection, MuonSection, SGDSection
from cuadrilla.errors import CheckpointError
from cuadrilla.model.weights import some

MUON_STEPS = 5
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that takes each singular value towards 1 (source: as above)."""
EPSILON = 1e-7
ADAM_EPSILON = 1e-8
BATCH_NUMBERS = 2**24
"""Limit of the elements of all matrices that are orthogonalised together, because their copies take memory."""

Parameters = Mapping[str, nn.Parameter]
OptimSection = MuonSection | AdamWSection | SGDSection


@dataclass
class Optimizer(ABC):
    """Parameters with one update rule, and their state, by the names under which it travels: a tensor "SLOT.NAME" for
    each of the `slots`, zeros before the first step. It is no torch.optim.Optimizer, because that loads torch's
    compiler, which takes a second of every start."""

    slots: ClassVar[tuple[str, ...]]
    params: Parameters
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        self.state = {f"{slot}.{name}": torch.zeros_like(p) for name, p in self.params.items() for slot in self.slots}

    @abstractmethod
    def step(self, factor: float = 1.0) -> None:
        """Step all parameters that have a gradient, at `factor` times the learning rate."""

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients that there are, by parameter."""
        return {name: parameter.grad for name, parameter in self.params.items() if parameter.grad is not None}


class Optimizers:
    """Several optimizers that step together."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts
        self.adaptive = frozenset(name for part in parts if isinstance(part, AdamW) for name in part.params)

    def step(self, factor: float, *, squares: Mapping[str, Tensor] | None = None) -> None:
        for part in self._parts:
            if squares is not None and isinstance(part, AdamW):
                part.step_with(squares, factor=factor)
            else:
                part.step(factor)

    def state_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for part in self._parts for name, tensor in part.state.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take copies as the new state; tensors of the old one stay as they are, for they may be a contribution's.
        Raises CheckpointError if another optimizer has written it."""
        if strange := sorted(self.state_tensors().keys() ^ tensors.keys()):
            raise CheckpointError(
                "this is the state of another optimizer: {names}",
                names=some(strange),
                hint="resume with the optimizer and the model the checkpoint was made with",
            )
        for part in self._parts:
            part.state = {name: tensors[name].to(old.device, copy=True) for name, old in part.state.items()}


@dataclass
class Muon(Optimizer):
    """Steps by the orthogonal matrix nearest to the Nesterov momentum. State and update are as in torch.optim.Muon.

    All parameters are matrices. `dtype`: number type of the Newton-Schulz iteration.
    """

    slots = ("momentum_buffer",)
    momentum: float
    dtype: torch.dtype

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        lr, gradients = self.lr * factor, self.gradients
        for names in _alike(gradients):
            rows, columns = gradients[names[0]].shape
            stacked_KMN = torch.stack([self._averaged(name, gradients[name]) for name in names])
            updates_KMN = orthogonalised(stacked_KMN.to(self.dtype))
            for name, update_MN in zip(names, updates_KMN.unbind(), strict=True):
                self.params[name].mul_(1 - lr * self.weight_decay)
                self.params[name].add_(update_MN, alpha=-lr * math.sqrt(max(1, rows / columns)))

    def _averaged(self, name: str, gradient: Tensor) -> Tensor:
        """The parameter's gradient with Nesterov momentum."""
        average = self.state[f"momentum_buffer.{name}"].lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(average, self.momentum)


def _alike(matrices: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of matrices grouped by shape and device, in batches of at most BATCH_NUMBERS elements."""
    kinds: dict[tuple[torch.Size, torch.device], list[str]] = {}
    for name, matrix in matrices.items():
        kinds.setdefault((matrix.shape, matrix.device), []).append(name)
    for (shape, _), alike in kinds.items():
        most = max(1, BATCH_NUMBERS // shape.numel())
        for first in range(0, len(alike), most):
            yield alike[first : first + most]


def orthogonalised(matrices_KMN: Tensor) -> Tensor:
    """The nearest matrices with singular values of about 1 (0.7 to 1.2), by Newton-Schulz in their own dtype."""
    a, b, c = MUON_COEFFICIENTS
    tall = matrices_KMN.size(1) > matrices_KMN.size(2)
    x_KRS = matrices_KMN.mT if tall else matrices_KMN  # the Gram matrix is the smaller one
    x_KRS = x_KRS / torch.linalg.vector_norm(x_KRS, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(MUON_STEPS):
        gram_KRR = x_KRS @ x_KRS.mT
        polynomial_KRR = torch.baddbmm(gram_KRR, gram_KRR, gram_KRR, beta=b, alpha=c)
        x_KRS = torch.baddbmm(x_KRS, polynomial_KRR, x_KRS, beta=a)
    return x_KRS.mT if tall else x_KRS


@dataclass
class AdamW(Optimizer):
    """The same bits as torch.optim.AdamW(fused=True): one kernel steps all parameters at once."""

    slots = ("exp_avg", "exp_avg_sq")
    betas: tuple[float, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state |= {f"step.{name}": torch.zeros((), device=p.device) for name, p in self.params.items()}

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        gradients = self.gradients
        adamw(
            [self.params[name] for name in gradients],
            list(gradients.values()),
            [self.state[f"exp_avg.{name}"] for name in gradients],
            [self.state[f"exp_avg_sq.{name}"] for name in gradients],
            [],
            [self.state[f"step.{name}"] for name in gradients],
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr * factor,
            weight_decay=self.weight_decay,
            eps=ADAM_EPSILON,
            maximize=False,
        )

    @torch.no_grad()
    def step_with(self, squares: Mapping[str, Tensor], *, factor: float) -> None:
        """Make a step, but with `squares` instead of the squares of `.grad` for the second moments."""
        rate, (beta1, beta2) = self.lr * factor, self.betas
        for name, gradient in self.gradients.items():
            parameter, number = self.params[name], float(self.state[f"step.{name}"].add_(1))
            mean = self.state[f"exp_avg.{name}"].lerp_(gradient, 1 - beta1)
            root = self.state[f"exp_avg_sq.{name}"].lerp_(squares[name], 1 - beta2).sqrt()
            root.div_(math.sqrt(1 - beta2**number)).add_(ADAM_EPSILON)
            parameter.mul_(1 - rate * self.weight_decay)
            parameter.addcdiv_(mean, root, value=-rate / (1 - beta1**number))


@dataclass
class SGD(Optimizer):
    """torch.optim.SGD(nesterov=True), weight decay included:  m ← β m + g,  θ ← θ − η (g + β m)."""

    slots = ("momentum_buffer",)
    momentum: float

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        for name, gradient in self.gradients.items():
            gradient = gradient.add(self.params[name], alpha=self.weight_decay)
            average = self.state[f"momentum_buffer.{name}"].mul_(self.momentum).add_(gradient)
            self.params[name].sub_(gradient.add_(average, alpha=self.momentum), alpha=self.lr * factor)


def make_optimizer(
    section: OptimSection, *, dtype: torch.dtype, not_matrices: tuple[str, ...] = ()
) -> Callable[[Parameters], Optimizers]:
    """A factory for the section's optimizer. `not_matrices`: how the names of matrices begin that Muon does not train.

    `dtype`: number type of the passes. If that is fp32, so is Muon's iteration; else it is bf16.
    """
    iterated = torch.float32 if dtype == torch.float32 else torch.bfloat16

    def make(params: Parameters) -> Optimizers:
        of_muon = params if isinstance(section, MuonSection) else {}
        matrices = {name: p for name, p in of_muon.items() if p.ndim == 2 and not name.startswith(not_matrices)}
        others = {name: p for name, p in params.items() if name not in matrices}
        decay = section.weight_decay or 0.0
        groups = (  # gains and biases have no decay
            ({name: p for name, p in others.items() if p.ndim >= 2}, decay),
            ({name: p for name, p in others.items() if p.ndim < 2}, 0.0),
        )
        parts: list[Optimizer] = []
        match section:
            case SGDSection(lr=lr, momentum=momentum):
                parts += [SGD(group, lr=lr, weight_decay=decayed, momentum=momentum) for group, decayed in groups]
            case MuonSection(adamw_lr=lr) | AdamWSection(lr=lr):
                betas = (section.beta1, section.beta2)
                parts += [AdamW(group, lr=lr, weight_decay=decayed, betas=betas) for group, decayed in groups]
        if isinstance(section, MuonSection):
            parts.insert(
                0, Muon(matrices, lr=section.lr, weight_decay=decay, momentum=section.momentum, dtype=iterated)
            )
        return Optimizers([part for part in parts if part.params])

    return make
