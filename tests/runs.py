"""Run trainings in this process, and read what they left in the run's folder."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuadrilla.model.task import Task
from cuadrilla.model.weights import WEIGHTS, read_tensors
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir, last_rows, read_object
from cuadrilla.runfile import resolve
from cuadrilla.sync.kinds import Strategy
from cuadrilla.train.checkpoint import OPTIMIZER, STATE, find_newest, tensors_sha256
from cuadrilla.train.runtime import Outcome
from cuadrilla.train.setup import RunContext, assemble
from cuadrilla.train.sinks import Sink
from tests.transports import WrapLink, run_through

RUN_FILE = """
sync.kind = "exact"
task = {kind = "file", path = "task.py:task"}
[train]
steps = 8
batch_sequences = 72
unit_sequences = 3
precision = "fp32"
threads = 1
device = "cpu"
[checkpoint]
every_seconds = 0
"""

UNEQUAL = {  # name → engine.workers
    "one": [1.0],
    "two equal": [1.0, 1.0],
    "three unequal": [1.0, 0.5, 0.25],
}


def prepare(
    folder: Path,
    task: Task,
    *sets: str,
    strategy: Strategy | None = None,
    stop_at: int = 0,
    sinks: Sequence[Sink] = (),
    clock: Callable[[], float] = time.monotonic,
) -> RunContext:
    """The context of a run of `task` in `folder`; it is resumed if there are checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    config, _ = decide(resolve(RUN_FILE, sets=sets).config, RunDir(folder))
    return assemble(config, RunDir(folder), task=task, sinks=sinks, strategy=strategy, stop_at=stop_at, clock=clock)


def execute(
    folder: Path,
    task: Task,
    *sets: str,
    strategy: Strategy | None = None,
    stop_at: int = 0,
    wrap_link: WrapLink | None = None,
) -> Outcome:
    """Run `task` in `folder`."""
    return run_through(prepare(folder, task, *sets, strategy=strategy, stop_at=stop_at), wrap_link=wrap_link)


class Saved(NamedTuple):
    path: Path
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def newest(folder: Path) -> Saved:
    """The newest checkpoint of a run."""
    path = find_newest(RunDir(folder).checkpoints)
    assert path is not None
    return Saved(path, read_tensors(path / WEIGHTS), read_tensors(path / OPTIMIZER), read_object(path / STATE))


def final(folder: Path) -> dict[str, Tensor]:
    """The weights of the newest checkpoint."""
    return newest(folder).model


def final_sha256(folder: Path) -> str:
    """One hash over weights and optimizer state of the newest checkpoint."""
    found = newest(folder)
    return tensors_sha256({**found.model, **{f"optimizer.{k}": v for k, v in found.optimizer.items()}})


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all tensors together."""
    difference = torch.cat([(a[name] - b[name]).flatten().double() for name in b])
    return float(difference.norm() / torch.cat([b[name].flatten().double() for name in b]).norm())


def workers(speeds: list[float]) -> str:
    """The setting for these workers: one in the coordinator's thread, or several threads, silent while they compute."""
    several = f'engine={{kind="crew", workers={speeds}, lost_after_seconds=3600}}'
    return several if len(speeds) > 1 else 'engine={kind="local"}'


def metrics(folder: Path) -> list[dict[str, Any]]:
    return last_rows(RunDir(folder).metrics)
