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


class Optimizer(ABC):
    """Parameters with one update rule, and the state of each: a tensor for each of the `slots`, zeros before the first
    step. It is no torch.optim.Optimizer, because that loads torch's compiler, which takes a second of every start."""

    slots: ClassVar[tuple[str, ...]]

    def __init__(self, params: Sequence[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.state = {p: {slot: torch.zeros_like(p) for slot in self.slots} for p in params}

    @abstractmethod
    def step(self, factor: float = 1.0) -> None:
        """Step all parameters that have a gradient, at `factor` times the learning rate."""

    @property
    def with_gradient(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.params if parameter.grad is not None]


class Optimizers:
    """Several optimizers that step together."""

    def __init__(self, parts: Sequence[Optimizer], *, names: Mapping[Tensor, str]) -> None:
        self._parts = [part for part in parts if part.params]
        self._names = names
        self.adaptive = frozenset(names[p] for part in self._parts if isinstance(part, AdamW) for p in part.params)

    def step(self, factor: float, *, squares: Mapping[str, Tensor] | None = None) -> None:
        for part in self._parts:
            if squares is not None and isinstance(part, AdamW):
                part.step_with({p: squares[self._names[p]] for p in part.params}, factor=factor)
            else:
                part.step(factor)

    def state_tensors(self) -> dict[str, Tensor]:
        return {
            f"{slot}.{self._names[parameter]}": tensor
            for part in self._parts
            for parameter, state in part.state.items()
            for slot, tensor in state.items()
        }

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
            for parameter, state in part.state.items():
                for slot, old in state.items():
                    state[slot] = tensors[f"{slot}.{self._names[parameter]}"].to(old.device, copy=True)


class Muon(Optimizer):
    """Steps by the orthogonal matrix nearest to the Nesterov momentum. State and update are as in torch.optim.Muon.

    All parameters are matrices. `dtype`: number type of the Newton-Schulz iteration.
    """

    slots = ("momentum_buffer",)

    def __init__(
        self, params: Sequence[nn.Parameter], *, lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self._momentum = momentum
        self._dtype = dtype

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        lr = self.lr * factor
        for batch in _alike(self.with_gradient):
            rows, columns = batch[0].shape
            stacked_KMN = torch.stack([self._averaged(parameter) for parameter in batch])
            updates_KMN = orthogonalised(stacked_KMN.to(self._dtype))
            for parameter, update_MN in zip(batch, updates_KMN.unbind(), strict=True):
                parameter.mul_(1 - lr * self.weight_decay)
                parameter.add_(update_MN, alpha=-lr * math.sqrt(max(1, rows / columns)))

    def _averaged(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's gradient with Nesterov momentum."""
        gradient = parameter.grad
        assert gradient is not None
        average = self.state[parameter]["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(average, self._momentum)


def _alike(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Matrices grouped by shape and device, in batches of at most BATCH_NUMBERS elements."""
    kinds: dict[tuple[torch.Size, torch.device], list[nn.Parameter]] = {}
    for matrix in matrices:
        kinds.setdefault((matrix.shape, matrix.device), []).append(matrix)
    for alike in kinds.values():
        most = max(1, BATCH_NUMBERS // alike[0].numel())
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


class AdamW(Optimizer):
    """The same bits as torch.optim.AdamW. Where the device has a fused kernel, it steps all parameters at once."""

    slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Sequence[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self._betas = betas
        self._fused = bool(params) and params[0].device.type in ("cpu", "cuda", "mps", "xpu")
        for parameter, state in self.state.items():
            state["step"] = torch.zeros((), device=parameter.device if self._fused else "cpu")

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        params = self.with_gradient
        states = [self.state[p] for p in params]
        adamw(
            list(params),
            [p.grad for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=self._fused,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=self.lr * factor,
            weight_decay=self.weight_decay,
            eps=ADAM_EPSILON,
            maximize=False,
        )

    @torch.no_grad()
    def step_with(self, squares: Mapping[Tensor, Tensor], *, factor: float) -> None:
        """Make a step, but with `squares` instead of the squares of `.grad` for the second moments."""
        rate, (beta1, beta2) = self.lr * factor, self._betas
        for parameter in self.with_gradient:
            assert parameter.grad is not None
            state = self.state[parameter]
            number = float(state["step"].add_(1))
            mean = state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
            root = state["exp_avg_sq"].lerp_(squares[parameter], 1 - beta2).sqrt()
            root.div_(math.sqrt(1 - beta2**number)).add_(ADAM_EPSILON)
            parameter.mul_(1 - rate * self.weight_decay)
            parameter.addcdiv_(mean, root, value=-rate / (1 - beta1**number))


class SGD(Optimizer):
    """torch.optim.SGD(nesterov=True), weight decay included:  m ← β m + g,  θ ← θ − η (g + β m)."""

    slots = ("momentum_buffer",)

    def __init__(self, params: Sequence[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self._momentum = momentum

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        for parameter in self.with_gradient:
            assert parameter.grad is not None
            gradient = parameter.grad.add(parameter, alpha=self.weight_decay)
            average = self.state[parameter]["momentum_buffer"].mul_(self._momentum).add_(gradient)
            parameter.sub_(gradient.add_(average, alpha=self._momentum), alpha=self.lr * factor)


def make_optimizer(
    section: OptimSection, *, is_matrix: Callable[[str, nn.Parameter], bool], dtype: torch.dtype
) -> Callable[[Parameters], Optimizers]:
    """A factory for the section's optimizer. `is_matrix(name, parameter)`: whether Muon trains it, if it is Muon's.

    `dtype`: number type of the passes. If that is fp32, so is Muon's iteration; else it is bf16.
    """

    def make(params: Parameters) -> Optimizers:
        matrices = [p for name, p in params.items() if isinstance(section, MuonSection) and is_matrix(name, p)]
        for_muon = set(map(id, matrices))
        others = [p for p in params.values() if id(p) not in for_muon]
        groups = (  # gains and biases have no decay
            ([p for p in others if p.ndim >= 2], section.weight_decay or 0.0),
            ([p for p in others if p.ndim < 2], 0.0),
        )
        parts: list[Optimizer]
        match section:
            case SGDSection(lr=lr, momentum=momentum):
                parts = [SGD(group, lr=lr, momentum=momentum, weight_decay=decay) for group, decay in groups]
            case MuonSection(adamw_lr=lr) | AdamWSection(lr=lr):
                betas = (section.beta1, section.beta2)
                parts = [AdamW(group, lr=lr, betas=betas, weight_decay=decay) for group, decay in groups]
        if isinstance(section, MuonSection):
            muon = Muon(
                matrices,
                lr=section.lr,
                momentum=section.momentum,
                weight_decay=section.weight_decay or 0.0,
                dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
            )
            parts = [muon, *parts]
        return Optimizers(parts, names={parameter: name for name, parameter in params.items()})

    return make
