"""The `Task` protocol: all that cuadrilla must know about a model and its data. `load_task` loads one from a file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from cuadrilla.data.loader import Dataset
from cuadrilla.errors import TaskError
from cuadrilla.messages import Message
from cuadrilla.user_file import UsersCode, load_file

Batch = Mapping[str, Tensor]  # the leading dimension of every tensor counts sequences (examples)


@dataclass(frozen=True, kw_only=True)
class TaskDefaults:
    """`length`: expected number of tokens in a sequence, used for planning (1 for examples without a length).

    `max_length`: upper bound of the tokens in a sequence; None if unknown. A worker's answer that counts more tokens is
    refused.

    `not_matrices`: names, or beginnings of names, of two-dimensional parameters that AdamW trains instead of Muon:
    embeddings and the output layer.
    """

    length: int
    max_length: int | None = None
    not_matrices: tuple[str, ...] = ()

    @property
    def counted(self) -> str:
        """The unit in which the task counts, as a word for messages."""
        return Message("tokens") if self.length > 1 else Message("examples")


@runtime_checkable
class Task(Protocol):
    """A model, its loss and its data, the same on every node. One with a `predict` can be served (docs/serve.md)."""

    defaults: TaskDefaults

    def model(self) -> nn.Module:
        """A new model on the CPU in fp32. Its weights may depend only on torch's generator, which the caller seeds."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The *sum* of the losses (a scalar with gradient), and the number of tokens or examples in it."""

    def data(self, split: Literal["train", "val"]) -> Dataset:
        """A map-style dataset with `len(data)` and `data[i]`: names and their arrays, without a batch dimension."""

    def data_hash(self) -> str:
        """A hash of the data. Resuming a run, and joining it, require data with the same hash."""

    def evaluate(self, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
        """Measures over held-out batches; "loss" is the one to minimise. NAME_error is the standard error of NAME."""


def loss_of(task: Task, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The task's loss of a training batch. Raises TaskError if it does not have the form that `Task.loss` requires."""
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
    """The task that `spec` (`file.py:name`) makes. File and `data` are relative to `folder`; `name` is given `data`.

    Raises TaskError if the file is missing, if it has no such name, or if the result is not a Task. An error inside the
    file is shown with its own text. The file may import modules that lie beside it.
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
        defined = "it defines: {names}"
        raise TaskError("{path} has no {name!r}", path=path, name=name, names=", ".join(own), hint=defined)
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
