"""Optimizers behind one small interface: Muon for the matrices inside the model, fused AdamW for the rest; or AdamW
or SGD for everything.

Muon: https://kellerjordan.github.io/posts/muon/. `torch.optim.Muon` orthogonalises one matrix after the other, in bf16,
which makes 2^-8 of a gradient's last fp32 bit; `Muon` here takes all matrices of one shape at once, and is as precise
as the passes. State travels as named tensors ("exp_avg.NAME", "momentum_buffer.NAME", "step.NAME"), never as pickled
objects.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from cuadrilla.config import AdamWSection, MuonSection, SGDSection
from cuadrilla.errors import CheckpointError

MUON_STEPS = 5
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that takes each singular value towards 1 (source: as above)."""
EPSILON = 1e-7
ADAM_EPSILON = 1e-8
BATCH_NUMBERS = 2**24
"""Of matrices that are orthogonalised together: their copies take memory."""

Parameters = Mapping[str, nn.Parameter]
OptimSection = MuonSection | AdamWSection | SGDSection


class Optimizer(ABC):
    """Groups of parameters with their settings, and a state for each parameter, as torch.optim.Optimizer has them: that
    one loads torch's compiler, which takes a second of every start."""

    def __init__(self, groups: Sequence[dict[str, Any]], **defaults: Any) -> None:
        self.param_groups = [{**defaults, **group} for group in groups]
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

    @abstractmethod
    def step(self) -> None:
        """Of all parameters that have a gradient."""

    @abstractmethod
    def new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Before its first step."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if not self.state[parameter]:
            self.state[parameter] = self.new_state(parameter)
        return self.state[parameter]


class Optimizers:
    """Several optimizers that step together; each group keeps its base learning rate beside the current one."""

    def __init__(self, parts: Sequence[Optimizer], *, names: Mapping[Tensor, str]) -> None:
        self._parts = parts
        self._names = names
        self.adaptive = frozenset(
            names[p]
            for part in parts
            if isinstance(part, AdamW)
            for group in part.param_groups
            for p in group["params"]
        )
        for part in self._parts:
            for group in part.param_groups:
                group["base_lr"] = group["lr"]

    def start(self) -> None:
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    part.state_of(parameter)

    def step(self, factor: float, *, squares: Mapping[str, Tensor] | None = None) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["base_lr"] * factor
            if squares is not None and isinstance(part, AdamW):
                part.step_with({p: squares[name] for p, name in self._names.items() if name in self.adaptive})
            else:
                part.step()

    def state_tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self._parts:
            for parameter, state in part.state.items():
                for key, value in state.items():
                    found[f"{key}.{self._names[parameter]}"] = torch.as_tensor(value)
        return found

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError when the state was written by another optimizer."""
        grouped: dict[str, dict[str, Tensor]] = {}
        for full, tensor in tensors.items():
            key, _, name = full.partition(".")
            grouped.setdefault(name, {})[key] = tensor
        for part in self._parts:
            part.state.clear()  # the checkpoint of step 0 has none: rolling back to it starts afresh
            for group in part.param_groups:
                for parameter in group["params"]:
                    state = grouped.pop(self._names[parameter], None)
                    if state is not None:
                        part.state[parameter] = {key: _place(key, value, parameter) for key, value in state.items()}
        if grouped:
            raise CheckpointError(
                "the optimizer's state names unknown parameters: {names}",
                names=", ".join(sorted(grouped)[:3]),
                hint="resume with the optimizer and the model the checkpoint was made with",
            )


def _place(key: str, value: Tensor, parameter: nn.Parameter) -> Any:
    """Step counters stay fp32 on the CPU unless the optimizer is fused on a GPU; all else goes to the parameter."""
    if key == "step" and parameter.device.type == "cpu":
        return value.clone()
    return value.to(parameter.device, copy=True)


class Muon(Optimizer):
    """Momentum, and of what it gives the nearest orthogonal matrix; state and update are those of torch.optim.Muon.

    `dtype`: of the iteration. All parameters are matrices.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for batch in _alike([p for p in group["params"] if p.grad is not None]):
                rows, columns = batch[0].shape
                stacked_KMN = torch.stack([self._momentum(p, beta=group["momentum"]) for p in batch])
                updates_KMN = orthogonalised(stacked_KMN.to(self._dtype))
                for parameter, update_MN in zip(batch, updates_KMN.unbind(), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update_MN, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))

    def _momentum(self, parameter: nn.Parameter, *, beta: float) -> Tensor:
        """Nesterov's."""
        gradient = parameter.grad
        assert gradient is not None
        average = self.state_of(parameter)["momentum_buffer"].lerp_(gradient, 1 - beta)
        return gradient.lerp(average, beta)

    def new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(parameter)}


def _alike(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those of one shape and device together, in batches of BATCH_NUMBERS at most."""
    kinds: dict[tuple[torch.Size, torch.device], list[nn.Parameter]] = {}
    for matrix in matrices:
        kinds.setdefault((matrix.shape, matrix.device), []).append(matrix)
    for alike in kinds.values():
        most = max(1, BATCH_NUMBERS // alike[0].numel())
        for first in range(0, len(alike), most):
            yield alike[first : first + most]


def orthogonalised(matrices_KMN: Tensor) -> Tensor:
    """Of each the nearest one with singular values around 1 (0.7 to 1.2), by Newton-Schulz; in its own dtype."""
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
    """torch.optim.AdamW, bit by bit; `fused`: one kernel for all parameters, where the device has it."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], fused: bool) -> None:
        super().__init__(groups, lr=lr, betas=betas, fused=fused, eps=ADAM_EPSILON)
        self._fused = fused

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state_of(p) for p in params]
            beta1, beta2 = group["betas"]
            adamw(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=group["fused"],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    @torch.no_grad()
    def step_with(self, squares: Mapping[Tensor, Tensor]) -> None:
        """A step whose second moments follow these instead of the squares of `.grad`."""
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state_of(parameter)
                number = float(state["step"].add_(1))
                mean = state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                root = state["exp_avg_sq"].lerp_(squares[parameter], 1 - beta2).sqrt()
                root.div_(math.sqrt(1 - beta2**number)).add_(group["eps"])
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.addcdiv_(mean, root, value=-rate / (1 - beta1**number))

    def new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        step = torch.zeros((), device=parameter.device if self._fused else "cpu")
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


class SGD(Optimizer):
    """torch.optim.SGD(nesterov=True), weight decay included:  m ← β m + g,  θ ← θ − η (g + β m)."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, lr=lr, momentum=momentum)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
                average = self.state_of(parameter)["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
                parameter.sub_(gradient.add_(average, alpha=group["momentum"]), alpha=group["lr"])

    def new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(parameter)}


def make_optimizer(
    section: OptimSection, *, is_matrix: Callable[[str, nn.Parameter], bool], dtype: torch.dtype
) -> Callable[[Parameters], Optimizers]:
    """A factory for the section's optimizer. `is_matrix(name, parameter)`: Muon's part, if the section is Muon's.

    `dtype`: what the passes compute in. With fp32 Muon's iteration is fp32 as well, else bf16.
    """

    def make(params: Parameters) -> Optimizers:
        names: dict[Tensor, str] = {parameter: name for name, parameter in params.items()}
        match section:
            case AdamWSection():
                return Optimizers([_adamw(list(params.values()), section, lr=section.lr)], names=names)
            case SGDSection():
                return Optimizers([_sgd(list(params.values()), section)], names=names)
            case MuonSection():
                matrices = [p for name, p in params.items() if is_matrix(name, p)]
                others = [p for name, p in params.items() if not is_matrix(name, p)]
                parts = [_muon(matrices, section, dtype=dtype)] if matrices else []
                return Optimizers(
                    parts + ([_adamw(others, section, lr=section.adamw_lr)] if others else []), names=names
                )

    return make


def _muon(params: list[nn.Parameter], section: MuonSection, *, dtype: torch.dtype) -> Muon:
    return Muon(
        [{"params": params}],
        lr=section.lr,
        momentum=section.momentum,
        weight_decay=section.weight_decay or 0.0,
        dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
    )


def _adamw(params: list[nn.Parameter], section: MuonSection | AdamWSection, *, lr: float) -> AdamW:
    device = params[0].device.type
    return AdamW(
        _groups(params, weight_decay=section.weight_decay or 0.0),
        lr=lr,
        betas=(section.beta1, section.beta2),
        fused=device in ("cpu", "cuda", "mps", "xpu"),
    )


def _sgd(params: list[nn.Parameter], section: SGDSection) -> SGD:
    return SGD(_groups(params, weight_decay=section.weight_decay), lr=section.lr, momentum=section.momentum)


def _groups(params: list[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Decay for matrices only; gains and biases have none."""
    decayed = [p for p in params if p.ndim >= 2]
    plain = [p for p in params if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
