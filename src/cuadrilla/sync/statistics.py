"""Running statistics (BatchNorm) that do not depend on which worker computes which unit.

    worker: one pass is one unit, so a module normalises over a unit; its mean and unbiased variance in each unit
            are added up over the lease, with the number of units        `collecting_statistics`, `add`, `tensors`
    merge:  m = Σ over the counted units / their number                             `reduce`
            running = (1 - momentum) · running + momentum · m, once per version     `step`

Only that step changes the statistics of record. An update that the guard skips leaves them as they are, a roll-back
takes them from the checkpoint, and the journal holds m. `momentum` is the module's own; None (a cumulative average)
means 1 / number of versions. `num_batches_tracked` counts versions. Every unit weighs the same, whatever its tokens.

Before the addition each value becomes two int64 numbers, its whole part and its 2^-46ths. So the sum is exact and does
not depend on order or split, strict or not. There is room for 65,536 units of values below 2^46. A larger value, or
one that is not finite, makes the contribution invalid.

During a pass a module writes into tensors of the worker, since a worker alone shares those of record with the
coordinator. For the pass its momentum is None and its count begins at 0, so it keeps the mean over its calls in the
pass: shared layers, and those that gradient checkpointing computes twice, are called several times. With a momentum of
None, torch.compile breaks its graph at the module. A module that a pass does not call, or that is in evaluation mode
(frozen), adds nothing. A module without any unit in a version keeps its statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from cuadrilla.errors import TaskError
from cuadrilla.messages import Message

VALUES = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
PART = 2.0**46
LARGEST = 2.0**46


def batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """The modules that keep running statistics, by name. Raises TaskError for one whose statistics cannot be merged."""
    found: dict[str, BatchNorm] = {}
    for name, module in model.named_modules():
        if not getattr(module, "track_running_stats", False):
            continue
        if not isinstance(module, BatchNorm) or any(getattr(module, key) is None for key in (*VALUES, COUNT)):
            raise TaskError(
                "{name} ({kind}) keeps running statistics that cannot be merged",
                name=name or Message("the model"),
                kind=type(module).__name__,
                hint="use BatchNorm, or track_running_stats=False, or a normalisation without them (GroupNorm)",
            )
        found[name] = module
    return found


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics, by their names in the model's state. Every version contains them."""
    return {
        _full(name, key): getattr(module, key)
        for name, module in batch_norms(model).items()
        for key in (*VALUES, COUNT)
    }


def sums_like(model: nn.Module) -> dict[str, Tensor]:
    """Zeros in the shapes of a contribution's sums: (2, num_features) for each value, () for each count; int64."""
    return {
        name: torch.zeros(() if name.endswith(COUNT) else (2, *tensor.shape), dtype=torch.int64)
        for name, tensor in statistics_of(model).items()
    }


class UnitStatistics:
    """The worker half."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = batch_norms(model)
        self._own = {name: _own_tensors(module) for name, module in self._modules.items()}
        self._zeros = sums_like(model)
        self.record = statistics_of(model)
        self.begin()

    def __bool__(self) -> bool:
        return bool(self._modules)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The sums of this lease. Later leases do not change these tensors."""
        return self._sums

    def begin(self) -> None:
        self._sums = {name: zeros.clone() for name, zeros in self._zeros.items()}

    @contextmanager
    def collecting_statistics(self) -> Iterator[None]:
        """Wraps the pass of one unit, forward and backward."""
        replaced: list[tuple[BatchNorm, dict[str, object]]] = []
        try:
            for name, module in self._modules.items():
                own = self._own[name]
                for tensor in own.values():
                    tensor.zero_()
                if module.training:
                    replaced.append((module, {key: getattr(module, key) for key in (*own, "momentum")}))
                    _assign(module, {**own, "momentum": None})
            yield
        finally:
            for module, before in replaced:
                _assign(module, before)

    def add(self) -> bool:
        """Add the statistics of the last pass. If a value is not finite or too large, nothing is added: False."""
        called = [name for name, own in self._own.items() if int(own[COUNT])]
        if not called:
            return True
        measured = {_full(name, key): self._own[name][key] for name in called for key in VALUES}
        values = torch.cat([*measured.values()]).cpu().double()  # one copy from the device, not one for each module
        whole = values.trunc()
        if not bool(whole.abs().max() < LARGEST):  # also False for NaN
            return False
        fixed = torch.stack([whole, ((values - whole) * PART).round()]).to(torch.int64)
        sizes = [len(tensor) for tensor in measured.values()]
        for name, part in zip(measured, torch.split(fixed, sizes, dim=1), strict=True):
            self._sums[name].add_(part)
        for name in called:
            self._sums[_full(name, COUNT)].add_(1)
        return True


class MergedStatistics:
    """The merge half. `mean`: each statistic's mean over the round's units, without modules that no unit called."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = batch_norms(model)
        self.record = statistics_of(model)
        self.mean: dict[str, Tensor] = {}

    def can_be(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """Whether `num_units` units can have these sums: variances and counts are in range, and means not too large."""
        for module in self._modules:
            count = int(tensors[_full(module, COUNT)])
            mean, variance = (tensors[_full(module, key)][0].double() for key in VALUES)
            largest = LARGEST * max(count, 1)
            if not 0 <= count <= num_units or bool((variance < -1).any() | (variance > largest).any()):
                return False
            if bool((mean.abs() > largest).any()):
                return False
        return True

    def reduce(self, contributions: Sequence[Mapping[str, Tensor]]) -> None:
        """Compute `mean`. The statistics of record do not change."""
        self.mean = {}
        for module in self._modules:
            num_units = sum(int(tensors[_full(module, COUNT)]) for tensors in contributions)
            for name in (_full(module, key) for key in VALUES if num_units):
                whole, parts = torch.stack([tensors[name] for tensors in contributions]).sum(0).cpu().double()
                self.mean[name] = ((whole + parts / PART) / num_units).to(self.record[name].dtype)

    @torch.no_grad()
    def step(self) -> None:
        """Move the statistics of record towards `mean`, and clear `mean`."""
        for prefix, module in self._modules.items():
            if _full(prefix, VALUES[0]) not in self.mean:
                continue
            num_versions = self.record[_full(prefix, COUNT)].add_(1)
            momentum = 1 / int(num_versions) if module.momentum is None else module.momentum
            for name in (_full(prefix, key) for key in VALUES):
                record = self.record[name]
                record.mul_(1 - momentum).add_(self.mean[name].to(record.device), alpha=momentum)
        self.mean = {}


def refuse_private_buffers(model: nn.Module) -> None:
    """For crews of several workers: the first pass raises TaskError if it changes a saved buffer that is not merged.

    Each worker would train with its own buffer, and the checkpoint would hold the coordinator's unchanged one.
    """
    saved = model.state_dict().keys() - statistics_of(model).keys()
    before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers() if name in saved}

    def look(*_arguments: object) -> None:
        hook.remove()
        now = dict(model.named_buffers())
        changed = [name for name, (old, count) in before.items() if now.get(name) is not old or old._version != count]
        if changed:
            raise TaskError(
                "a forward pass changes the buffer {name}, which is not merged between workers",
                name=changed[0],
                hint="make it a parameter, register it with persistent=False if it is a cache, or use one worker",
            )

    hook = model.register_forward_hook(look)


def _full(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def _own_tensors(module: BatchNorm) -> dict[str, Tensor]:
    """The tensors a module writes into during a pass. Python reads the count at each call, so it stays on the CPU."""
    own = {key: torch.zeros_like(getattr(module, key)) for key in VALUES}
    return {**own, COUNT: torch.zeros((), dtype=torch.int64)}


def _assign(module: nn.Module, values: Mapping[str, object]) -> None:
    for key, value in values.items():
        setattr(module, key, value)
