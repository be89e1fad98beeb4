"""Sharded training inside an island: weights, gradients and optimizer state are divided among its ranks (FSDP2).

No rank holds the weights of record whole, so both halves exist at every rank, over its shards:

    worker:  for each unit: the ranks gather a block's weights, compute, and add up its gradient, of which each
             keeps its shard                                                            `begin`, `local_step`
    merge:   grad = Σ · planned / Σ tokens, norm over all shards, clip, optimizer step  `reduce`, `step`
             one tensor after the other, gathered whole: what a checkpoint holds        `full`, `state_tensors`

A contribution holds tokens and loss, no tensors. Rank 0's merge half decides, as ever; before each thing that all must
do together it tells the others (an order), who do the same with theirs (`obey`) while they wait for the next event.

Invariants: the ranks make the same passes at the same time, one for each unit; a rank with fewer units repeats one and
counts it as nothing (`Lease.padding`). Gradients are sums, so that uneven parts weigh by their tokens. A rank that
finds a loss that is not finite goes on with the others and makes the norm NaN: the guard skips the update.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cuadrilla.errors import TaskError
from cuadrilla.link.base import Contribution, Lease, Tensors
from cuadrilla.sync.statistics import batch_norms
from cuadrilla.sync.strategy import Recipe, Reduced, Stepper, Sums, trainable
from cuadrilla.sync.work import Rounds, Share, WholeRounds

Order = Mapping[str, Any]
"""What all ranks are to do now: `do` and its numbers. It travels as JSON."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """The strategy of `train.shard`, for one model: `half` has its shards, `tensors` are those of its state.

    `tell`: at rank 0, hands an order to all other ranks; at others, does nothing.
    """

    half: "NativeWorker"
    tensors: Mapping[str, Tensor]
    tell: Callable[[Order], None]
    max_staleness: int | None = None
    moves_weights: bool = False

    def worker(self, model: nn.Module, recipe: Recipe) -> "NativeWorker":
        del model, recipe
        return self.half

    def merge(self, model: nn.Module, recipe: Recipe) -> "NativeMerge":
        del model
        return NativeMerge(self, recipe=recipe)

    def rounds(self, *, share: Share) -> Rounds:
        return WholeRounds(share=share)

    def version_like(self, model: nn.Module) -> dict[str, Tensor]:
        """Nothing travels: each rank has its shards."""
        del model
        return {}

    def contribution_like(self, model: nn.Module) -> dict[str, Tensor]:
        del model
        return {}

    def check(self, model: nn.Module, *, several_workers: bool) -> None:
        del several_workers
        if running := list(batch_norms(model)):
            raise TaskError(
                "{name} keeps running statistics, which train.shard does not divide",
                name=running[0],
                hint="use a normalisation without them (LayerNorm, GroupNorm), or leave train.shard off",
            )


class NativeWorker:
    """The worker half, over a rank's shards of the gradients. Made before the first pass: during one, the model has
    whole parameters in the place of these.
    """

    one_unit_per_micro_step = True
    units_per_step = 0

    def __init__(self, model: nn.Module) -> None:
        self.params = trainable(model)
        self.valid = True

    def begin(self, lease: Lease) -> None:
        del lease
        self.valid = True
        for parameter in self.params.values():
            parameter.grad = None

    def measuring(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_micro_step(self, sums: Sums) -> None:
        """Whatever this rank has found, it stays in step with the others."""
        self.valid = self.valid and sums.valid
        sums.valid = True

    def local_step(self, sums: Sums) -> None:
        """The merge half steps, not this one."""

    def contribute(self) -> Tensors:
        return {}

    def apply(self, version: Mapping[str, Tensor]) -> None:
        """The shards are those of this version already."""


class NativeMerge:
    """The merge half: at rank 0 what the coordinator uses, at others what `obey` does."""

    def __init__(self, native: Native, *, recipe: Recipe) -> None:
        self._worker = native.half
        self._params = native.half.params
        self._tensors = native.tensors
        self._tell = native.tell
        self._recipe = recipe
        self._optimizer: Stepper = recipe.make_optimizer(self._params)

    @property
    def params(self) -> Mapping[str, Tensor]:
        """No version holds any."""
        return {}

    def reduce(self, contributions: Sequence[Contribution], *, planned_tokens: int) -> Reduced:
        """Each rank's shards of the weighted mean gradient, and the norm of the whole."""
        assert len(contributions) == 1, "the gradients are those of one lease"
        tokens = contributions[0].tokens
        norm = self._together({"do": "reduce", "scale": planned_tokens / max(tokens, 1)})
        return Reduced(norm=norm, tokens=tokens)

    def sizes(self, contributions: Sequence[Contribution]) -> list[float]:
        """There is one contribution: nothing to compare."""
        return [0.0 for _ in contributions]

    def zeros(self, contributions: Sequence[Contribution]) -> tuple[int, ...]:
        del contributions
        return ()

    def can_hold(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        del num_units
        return not tensors

    def update(self) -> Mapping[str, Tensor]:
        raise AssertionError("a sharded run has no journal")

    def load_update(self, update: Mapping[str, Tensor]) -> None:
        del update
        raise AssertionError("a sharded run has no journal")

    def step(self, *, norm: float, tokens: int, version: int) -> float:
        del version
        factor, clip = self._recipe.lr_factor(tokens), self._recipe.clip_norm
        self._together({"do": "step", "factor": factor, "scale": clip / norm if clip and norm > clip else 1.0})
        return factor

    def full(self) -> dict[str, Tensor]:
        """The model's tensors, whole, in main memory."""
        return self._gathered("model")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Whole tensors that rank 0 has become every rank's shards."""
        self._scatter("model", tensors)

    def state_tensors(self) -> dict[str, Tensor]:
        return self._gathered("optimizer")

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._scatter("optimizer", tensors)

    def obey(self, order: Order, *, source: Tensors | None = None) -> Any:
        """Do what all ranks do now. `source`: at rank 0, whole tensors to be divided."""
        match order["do"]:
            case "reduce":
                return self._reduce(order["scale"])
            case "step":
                for gradient in self._gradients() if order["scale"] != 1 else ():
                    gradient.mul_(order["scale"])
                self._optimizer.step(order["factor"])
                return None
            case "gather":
                return gathered(self._state(order["what"]), keep=dist.get_rank() == 0)
            case "scatter":
                return self._divide(order["what"], order["names"], source)
        raise AssertionError(order)

    def _together(self, order: Order, *, source: Tensors | None = None) -> Any:
        self._tell(order)
        return self.obey(order, source=source)

    def _gathered(self, what: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._together({"do": "gather", "what": what})
        return found

    def _scatter(self, what: str, tensors: Tensors) -> None:
        self._together({"do": "scatter", "what": what, "names": list(tensors)}, source=tensors)

    def _state(self, what: str) -> Mapping[str, Tensor]:
        return self._tensors if what == "model" else self._optimizer.state_tensors()

    def _reduce(self, scale: float) -> float:
        """Scale the gradients; their norm over all ranks, NaN where one has found something that is not finite."""
        squares = torch.zeros((), dtype=torch.float64)
        for gradient in self._gradients():
            if scale != 1:
                gradient.mul_(scale)
            squares += local(gradient).double().square().sum().cpu()
        if not self._worker.valid:
            squares.fill_(math.nan)
        dist.all_reduce(squares)
        return math.sqrt(squares) if squares >= 0 else math.nan

    def _gradients(self) -> list[Tensor]:
        """A parameter that no pass has used has a zero one: what AdamW makes of it is the same for every way."""
        found = []
        for parameter in self._params.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(parameter.grad)
        return found

    @torch.no_grad()
    def _divide(self, what: str, names: Sequence[str], source: Tensors | None) -> None:
        if what == "model":
            for name in names:
                put(self._tensors[name], None if source is None else source[name])
            return
        state: dict[str, Tensor] = {}
        for full_name in names:
            key, _, name = full_name.partition(".")
            like = torch.zeros(()) if key == "step" else torch.zeros_like(self._params[name])
            state[full_name] = put(like, None if source is None else source[full_name])
        self._optimizer.load_state_tensors(state)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put(target: Tensor, source: Tensor | None) -> Tensor:
    """Rank 0's whole tensor into every rank's `target`, which is returned."""
    if not isinstance(target, DTensor):
        value = source.to(target.device, target.dtype) if source is not None else torch.empty_like(target)
        dist.broadcast(value, src=0)
        target.copy_(value)
        return target
    device = target.to_local().device
    whole = torch.empty(target.shape, dtype=target.dtype, device=device) if source is None else source.to(device)
    target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
    return target


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Each tensor whole, one after the other; on the CPU where it is kept."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole.detach().cpu()
    return found
