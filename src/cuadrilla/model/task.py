"""The `Task` protocol: everything cuadrilla needs to know about a model, and how to load one from a user's file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from cuadrilla.data.loader import Dataset
from cuadrilla.errors import TaskError
from cuadrilla.user_file import UsersCode, load_file

Batch = Mapping[str, Tensor]  # the leading dimension of every tensor counts sequences (examples)


@dataclass(frozen=True, kw_only=True)
class TaskDefaults:
    """`length`: tokens counted for one sequence when planning (1 for examples without a length).

    `max_length`: the most that one can count; None where that is not known. An answer of a worker that counts more is
    refused.

    `not_matrices`: names (or beginnings) of two-dimensional parameters that Muon should leave to AdamW: embeddings
    and the output layer.

    `blocks`: names of modules that gradient checkpointing computes again as one; a ModuleList stands for its members.
    Without any they are found (`blocks.py`).
    """

    length: int
    max_length: int | None = None
    not_matrices: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()

    @property
    def counted(self) -> str:
        """What the task's losses count, for people."""
        return "tokens" if self.length > 1 else "examples"


@runtime_checkable
class Task(Protocol):
    """A model, its loss and its data. Identical on every node. One with a `predict` can be served (docs/serve.md)."""

    defaults: TaskDefaults

    def model(self) -> nn.Module:
        """A new model on the CPU in fp32; its weights depend on torch's random numbers only, which the caller seeds."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The *sum* of the losses (a scalar with gradient) and how many tokens or examples it counts."""

    def data(self, split: Literal["train", "val"]) -> Dataset:
        """Map-style data: `len(data)` and `data[i]`, a mapping of names to arrays without a batch dimension."""

    def data_hash(self) -> str:
        """Equal for equal data: a run is resumed, and a machine joins, only with the same."""

    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        """Measures over held-out batches; "loss" is the one to minimise. NAME_error is the standard error of NAME."""


def loss_of(task: Task, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The task's loss of a training batch. Raises TaskError when it is not what the protocol asks for."""
    match task.loss(model, batch):
        case (Tensor(ndim=0, requires_grad=True) as total, int(count)) if count >= 0:
            return total, count
        case other:
            raise TaskError(
                "{task}.loss returned {found:.200}",
                task=type(task).__name__,
                found=repr(other),
                hint="return the sum of the losses (a tensor of shape (), with gradient) and how many it counts",
            )


def load_task(spec: str, *, folder: Path, data: str = "") -> Task:
    """The Task that `file.py:name` makes, the file relative to `folder`; so is its `data`, if it has any.

    Raises TaskError when the file is missing, when it has no such name, or when what it gives is not a Task. An error
    inside the file is shown with its own text. The file may import modules that lie beside it.
    """
    file_name, _, name = spec.rpartition(":")
    path = (folder / file_name).resolve()
    if not path.is_file():
        hint = "task.path is file.py:name, relative to the run file"
        raise TaskError("task file {path} does not exist", path=path, hint=hint)
    module = load_file(path)
    make = getattr(module, name, None)
    if make is None:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise TaskError(
            "{path} has no {name!r}", path=path, name=name, hint="it defines: {names}", names=", ".join(own)
        )
    with UsersCode():
        task = make(*([(folder / data).absolute()] if data else [])) if data or callable(make) else make
    if not isinstance(task, Task):
        lacking = [
            part for part in ("defaults", "model", "loss", "data", "data_hash", "evaluate") if not hasattr(task, part)
        ]
        raise TaskError(
            "{name} is not a Task: it lacks {missing}",
            name=spec,
            missing=", ".join(lacking),
            hint="see examples/ and docs/tasks.md",
        )
    return task
