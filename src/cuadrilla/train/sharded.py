"""A model divided among the ranks of an island: FSDP2 over its blocks, and a task that all ranks compute together.

The hooks of FSDP2 sit at a module's call, and a task may use its model by any method. So the model is put into a module
whose call is the task's whole loss: outside of it the weights are shards.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cuadrilla.config import AdamWSection, Config, ExactSync
from cuadrilla.data.loader import Dataset
from cuadrilla.errors import ConfigError, TaskError
from cuadrilla.messages import Message
from cuadrilla.model.blocks import blocks_of
from cuadrilla.model.task import Batch, Task
from cuadrilla.sync.native import Native, NativeWorker, Order
from cuadrilla.train.coordinate import model_tensors
from cuadrilla.train.precision import Precision

EVALUATE: Order = {"do": "evaluate"}

Tell = Callable[[Order], None]


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """What takes the place of a run's own task and strategy."""

    task: "TogetherTask"
    strategy: Native
    initial: Mapping[str, Tensor]
    """At rank 0, the weights to begin with where other ranks may have others; none where all have them already."""


class Whole(nn.Module):
    """Calls something with the model; during the call all ranks have, block by block, its whole weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, use: Callable[[nn.Module], Any]) -> Any:
        return use(self.model)


class TogetherTask:
    """A task whose loss and evaluation all ranks compute at the same time. `tell`: at rank 0."""

    def __init__(self, task: Task, whole: Whole, *, tell: Tell) -> None:
        self._task = task
        self._whole = whole
        self._tell = tell
        self.defaults = task.defaults

    def model(self) -> nn.Module:
        return self._task.model()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        assert model is self._whole.model
        found: tuple[Tensor, int] = self._whole(lambda inner: self._task.loss(inner, batch))
        return found

    def data(self, split: Literal["train", "val"]) -> Dataset:
        return self._task.data(split)

    def data_hash(self) -> str:
        return self._task.data_hash()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        """The same at every rank."""
        assert model is self._whole.model
        self._tell(EVALUATE)
        found: dict[str, float] = self._whole(lambda inner: self._task.evaluate(inner, batches))
        assert isinstance(self._whole, FSDPModule)
        self._whole.reshard()
        return found


def shard(
    task: Task,
    model: nn.Module,
    *,
    device: torch.device,
    ranks: int,
    precision: Precision,
    tell: Tell,
    initial: Mapping[str, Tensor],
) -> Sharded:
    """Divide the model among all ranks, on their devices. Raises TaskError for one that cannot be."""
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy()
    if precision.dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for parameter in frozen:
        parameter.data = parameter.data.to(device)
    whole = Whole(model)
    for part in (*blocks_of(model, named=task.defaults.blocks, setting="train.shard"), whole):
        try:
            made = fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=frozen)
        except ValueError as error:
            hint = "change that in the model, or leave train.shard off"
            raise TaskError("the model cannot be divided among ranks: {reason}", reason=error, hint=hint) from error
        made.set_gradient_divide_factor(1.0)  # sums, not means
        made.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    strategy = Native(half=NativeWorker(model), tensors=model_tensors(model), tell=tell)
    return Sharded(task=TogetherTask(task, whole, tell=tell), strategy=strategy, initial=initial)


def require_shardable(config: Config, precision: Precision) -> None:
    """Raises ConfigError for settings that a sharded run does not know."""
    problems = (
        (
            not isinstance(config.optim, AdamWSection),
            Message("optim.kind {kind} is not divided among ranks", kind=config.optim.kind),
            Message('set optim.kind = "adamw" and its optim.lr'),
        ),
        (
            bool(config.outer.every),
            Message("the outer step is not divided among ranks"),
            Message("set outer.every = 0"),
        ),
        (
            not isinstance(config.sync, ExactSync),
            Message("asynchronous training is not divided among ranks"),
            Message('set sync.kind = "exact"'),
        ),
        (
            config.sync.strict,
            Message("strict mode adds in fixed point, and FSDP2 does not"),
            Message("set sync.strict = false"),
        ),
        (config.train.compile, Message("it was never tried with torch.compile"), Message("set train.compile = false")),
        (
            precision.loss_scale != 1,
            Message("fp16 needs a loss scale of its own at each rank"),
            Message('set train.precision to "bf16" or "fp32"'),
        ),
        (
            config.checkpoint.journal == "on",
            Message("no rank has the whole gradient for a journal"),
            Message('set checkpoint.journal = "auto"'),
        ),
    )
    for found, reason, remedy in problems:
        if found:
            raise ConfigError("train.shard: {reason}", reason=reason, hint=remedy)
