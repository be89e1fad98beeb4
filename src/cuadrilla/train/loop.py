"""The training loop of one worker, alone or one of many: lease → batches → loss sums → contribution → new version.

The loop computes; the strategy merges; the link carries. Nothing here knows how many workers there are.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cuadrilla.config import RunSection, TrainSection
from cuadrilla.data.loader import UnitLoader
from cuadrilla.errors import ResourceError
from cuadrilla.link.base import Contribution, Goodbye, Hello, Lease, Link, Progress, Stop, Version
from cuadrilla.model.task import Task, loss_of
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.sync.strategy import Sums
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.precision import PASS_TOKENS, Precision

LOSS_RESOLUTION = 2.0**24  # loss sums are multiples of 2^-24: their float64 sum does not depend on the order
MIN_LOSS_SCALE = 2.0**-10
OUT_OF_MEMORY_TEXTS = ("out of memory", "DefaultCPUAllocator", "can't allocate memory")

log = logging.getLogger(__name__)


def train(
    link: Link,
    *,
    task: Task,
    model: nn.Module,
    sync: ExactWorker,
    worker: "WorkerSettings",
) -> Stop:
    """Work for the coordinator behind `link` until it says stop; return its Stop message.

    `model` must be on `worker.device`. `sync` holds its parameters, which the first Version overwrites.
    Raises ResourceError, and what the task and the link raise.
    """
    # -- set up --------------------------------------------------------------------------------------------------------
    section, device, precision = worker.train, worker.device, worker.precision
    loader = UnitLoader(task.data("train"), seed=worker.run.seed, unit_sequences=section.unit_sequences, device=device)
    model.train()
    loss_scale = precision.loss_scale
    pass_limit = section.unit_sequences if sync.one_unit_per_micro_step else max_pass_sequences(task, worker)
    newest: Version | None = None  # not downloaded until a lease comes: an idle worker downloads nothing
    micro_steps = 0

    # -- join ----------------------------------------------------------------------------------------------------------
    link.call(Hello(speed_hint=worker.speed_hint, environment={**code_fingerprint(task, model), **environment(device)}))

    # -- the loop ------------------------------------------------------------------------------------------------------
    while not isinstance(event := link.next_event(), Stop):
        if isinstance(event, Version):
            newest = event
            continue

        lease: Lease = event
        began = time.monotonic()
        if newest is not None:
            sync.apply(link.download(newest.parameters))
            newest = None
        transfer_seconds = time.monotonic() - began
        indices = loader.indices(lease.units)
        step_sequences = math.ceil(len(lease.units) / lease.steps) * section.unit_sequences
        sync.begin(lease)
        sums, first = Sums(), 0
        while first < len(indices) and sums.valid and not link.interrupted():
            count = min(pass_limit, step_sequences - first % step_sequences, len(indices) - first)
            try:
                batch = loader.batch(indices[first : first + count])
                unit = lease.units[first // section.unit_sequences]
                worker.seed_pass(unit, first)
                micro_step(task, model, batch, worker, sums=sums, scale=loss_scale / lease.planned_tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                pass_limit = halved_pass(count, fixed=sync.one_unit_per_micro_step, error=error)
                log.warning("out of memory with %d sequences in a pass: from now on %d", count, pass_limit)
                sync.begin(lease)  # the failed backward pass may have added a part of its gradient
                sums, first = Sums(), 0
                continue
            sync.after_micro_step(sums)
            micro_steps += 1
            first += count
            link.call(Progress(micro_steps=micro_steps, part=first / len(indices)))

            if first % step_sequences and first < len(indices):
                continue
            if precision.loss_scale == 1 or unscale(sync, loss_scale):
                sync.local_step(sums)
            elif loss_scale > MIN_LOSS_SCALE:
                loss_scale /= 2
                log.info("fp16 overflow: loss scale is now %g", loss_scale)
                sync.begin(lease)
                sums, first = Sums(), 0
            else:
                sums.valid = False
        if link.interrupted():
            continue

        link.call(
            Contribution(  # not in a variable, which would keep its tensors in memory during the next lease
                lease_id=lease.lease_id,
                tokens=sums.tokens,
                loss_sum=sums.loss,
                tensors=sync.contribute(),
                transfer_seconds=transfer_seconds,
                valid=sums.valid and math.isfinite(sums.loss),
            )
        )

    link.call(Goodbye(reason=event.reason))
    return event


def micro_step(
    task: Task, model: nn.Module, batch: Mapping[str, Tensor], worker: "WorkerSettings", *, sums: Sums, scale: float
) -> None:
    """Run one pass forward and backward. Add its tokens to the sums, and its loss, rounded to a multiple of 2^-24; a
    non-finite one makes them invalid. As the loss is local to this function, a failed pass frees its activations."""
    with worker.precision.around(model, worker.device):
        loss, tokens = loss_of(task, model, batch)
    torch.autograd.backward([loss * scale])
    value = float(loss.detach())
    sums.tokens += tokens
    if math.isfinite(value):
        sums.loss += round(value * LOSS_RESOLUTION) / LOSS_RESOLUTION
    else:
        sums.valid = False


def max_pass_sequences(task: Task, worker: "WorkerSettings") -> int:
    """Limit of sequences in one pass. It depends on no measurement, so the same run always has the same passes."""
    section, whole = worker.train, worker.train.batch_sequences
    return section.pass_sequences or (
        whole if worker.device.type != "cpu" else min(whole, max(1, worker.pass_tokens // task.defaults.length))
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of a worker besides its task: where and how it computes, and how fast it is expected to be.

    `pass_tokens`: limit of tokens in one pass on a CPU. On other devices a pass may hold the whole batch.
    """

    run: RunSection
    train: TrainSection
    device: torch.device
    precision: Precision
    speed_hint: float = 1.0
    pass_tokens: int = PASS_TOKENS

    def seed_pass(self, unit: int, first: int) -> None:
        """Seed the random numbers of a pass from the run's seed, its first unit and its position in that unit."""
        key = (self.run.seed * 1_000_003 + unit) * 1_000_003 + first % self.train.unit_sequences
        seed = torch.default_generator.manual_seed if self.device.type == "cpu" else torch.manual_seed
        seed(key % 2**63)  # torch.manual_seed visits absent accelerators: 255 µs of a strict pass of 3 ms


def unscale(sync: ExactWorker, loss_scale: float) -> bool:
    """Divide the gradients by the loss scale; return False if one of them overflowed."""
    for parameter in sync.params.values():
        if parameter.grad is not None:
            parameter.grad.div_(loss_scale)
            if not bool(torch.isfinite(parameter.grad).all()):
                return False
    return True


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether memory ran out. CUDA and Python have a class for it; the CPU and MPS allocators only have a message."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


def halved_pass(count: int, *, fixed: bool, error: Exception) -> int:
    """Half the sequences of a pass that did not fit. Raises ResourceError for a pass that cannot be smaller."""
    if fixed or count == 1:
        raise ResourceError(
            "out of memory: a unit does not fit in one pass, and strict mode and BatchNorm need it whole"
            if fixed
            else "out of memory with a single sequence in a pass",
            hint="a smaller model, a shorter context or smaller units",
        ) from error
    return count // 2


def environment(device: torch.device) -> dict[str, str]:
    """Facts that must be equal on all machines for equal bits. They are compared in strict mode."""
    return {
        "torch": torch.__version__,
        "device": device.type,
        "cpu": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else "any",
        "threads": str(torch.get_num_threads()),
    }
