"""Running statistics (BatchNorm) that do not depend on which worker computes which unit.

    worker: one pass is one unit, so a module normalises over a unit; its mean and unbiased variance in each unit
            are added up over the lease, with the number of units                   `begin`, `add`, `sums`
    merge:  m = Σ over the counted units / their number                             `means`
            running = (1 - momentum) · running + momentum · m, once per version     `step`

Only that step changes the statistics of record. An update that the guard skips leaves them as they are, a roll-back
takes them from the checkpoint, and the journal holds m. `momentum` is the module's own; None (a cumulative average)
means 1 / number of versions. `num_batches_tracked` counts versions. Every unit weighs the same, whatever its tokens.

Before the addition each value becomes two int64 numbers, its whole part and its 2^-46ths. So the sum is exact and does
not depend on order or split, strict or not. There is room for 65,536 units of values below 2^46. A larger value, or
one that is not finite, makes the contribution invalid.

A worker's modules are never those of record (`with_own_statistics`), and measure one unit at a time: their momentum is
None and their count begins at 0, so they keep the mean over their calls in the pass. Shared layers, and those that
gradient checkpointing computes twice, are called several times. With a momentum of None, torch.compile breaks its graph
at the module. A module that a pass does not call, or that is in evaluation mode (frozen), adds nothing. A module
without any unit in a version keeps its statistics.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from cuadrilla.errors import TaskError
from cuadrilla.messages import Message

VALUES = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
FRACTION_SCALE = 2.0**46
MAX_VALUE = 2.0**46


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


def with_own_statistics(model: nn.Module) -> nn.Module:
    """A copy of the model that shares all its tensors except the running statistics."""
    own, tensors = statistics_of(model).keys(), [*model.named_parameters(), *model.named_buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for name, tensor in tensors if name not in own})


class UnitStatistics:
    """The worker half. Its model's modules are for measuring only."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = batch_norms(model)
        for module in self._modules.values():
            module.momentum = None
            module.num_batches_tracked = torch.zeros((), dtype=torch.int64)  # on the CPU: Python reads it
        self.record = statistics_of(model)
        self._zeros = sums_like(model)
        self.begin()

    def begin(self) -> None:
        """Forget all units. Contributions keep the tensors of earlier sums."""
        self.sums = {name: zeros.clone() for name, zeros in self._zeros.items()}
        self._reset()

    def _reset(self) -> None:
        for module in self._modules.values():
            if module.training:
                module.reset_running_stats()

    def add(self) -> bool:
        """Add the statistics of the last pass. If a value is not finite or too large, nothing is added: False."""
        record, modules = self.record, self._modules.items()
        called = [name for name, module in modules if module.training and int(record[_full(name, COUNT)])]
        if not called:
            return True
        measured = {_full(name, key): record[_full(name, key)] for name in called for key in VALUES}
        values = torch.cat([*measured.values()]).cpu().double()  # one copy from the device, not one for each module
        self._reset()
        whole = values.trunc()
        if not bool(whole.abs().max() < MAX_VALUE):  # also False for NaN
            return False
        fixed = torch.stack([whole, ((values - whole) * FRACTION_SCALE).round()]).to(torch.int64)
        sizes = [len(tensor) for tensor in measured.values()]
        for name, part in zip(measured, torch.split(fixed, sizes, dim=1), strict=True):
            self.sums[name].add_(part)
        for name in called:
            self.sums[_full(name, COUNT)].add_(1)
        return True


class RunningStatistics:
    """The merge half: the statistics of record."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = batch_norms(model)
        self.record = statistics_of(model)

    def can_be(self, tensors: Mapping[str, Tensor], *, num_units: int) -> bool:
        """Whether `num_units` units can have these sums: variances and counts are in range, and means not too large."""
        for module in self._modules:
            count = int(tensors[_full(module, COUNT)])
            mean, variance = (tensors[_full(module, key)][0].double() for key in VALUES)
            largest = MAX_VALUE * max(count, 1)
            in_range = (variance >= -1) & (variance <= largest) & (mean.abs() <= largest)
            if not (0 <= count <= num_units and bool(in_range.all())):
                return False
        return True

    def means(self, contributions: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Each statistic's mean over the round's units, without modules that no unit called."""
        found: dict[str, Tensor] = {}
        for module in self._modules:
            num_units = sum(int(tensors[_full(module, COUNT)]) for tensors in contributions)
            for name in (_full(module, key) for key in VALUES if num_units):
                whole, parts = torch.stack([tensors[name] for tensors in contributions]).sum(0).cpu().double()
                found[name] = ((whole + parts / FRACTION_SCALE) / num_units).to(self.record[name].dtype)
        return found

    @torch.no_grad()
    def step(self, means: Mapping[str, Tensor]) -> None:
        """Move the statistics of record towards the means of a version."""
        for prefix, module in self._modules.items():
            if _full(prefix, VALUES[0]) not in means:
                continue
            num_versions = self.record[_full(prefix, COUNT)].add_(1)
            momentum = 1 / int(num_versions) if module.momentum is None else module.momentum
            for name in (_full(prefix, key) for key in VALUES):
                record = self.record[name]
                record.mul_(1 - momentum).add_(means[name].to(record.device), alpha=momentum)


def refuse_private_buffers(model: nn.Module) -> None:
    """For crews of several workers: the first pass raises TaskError if it changes a saved buffer that is not merged.

    Each worker would train with its own buffer, and the checkpoint would hold the coordinator's unchanged one.
    """
    saved = model.state_dict().keys() - statistics_of(model).keys()
    before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers() if name in saved}

    def check(module: nn.Module, *_arguments: object) -> None:
        hook.remove()
        module._forward_hooks.pop(hook.id, None)  # the module may be a copy of the model
        now = dict(module.named_buffers())
        changed = [name for name, (old, count) in before.items() if now.get(name) is not old or old._version != count]
        if changed:
            raise TaskError(
                "a forward pass changes the buffer {name}, which is not merged between workers",
                name=changed[0],
                hint="make it a parameter, register it with persistent=False if it is a cache, or use one worker",
            )

    hook = model.register_forward_hook(check)


def _full(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
