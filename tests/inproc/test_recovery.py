"""Resuming after a crash, with changed settings and with damaged files: tests of defects that were found once."""

import copy
import errno
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from cuadrilla.errors import ConfigError
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.runfile import resolve
from cuadrilla.train.checkpoint import list_checkpoints, version_of
from cuadrilla.train.evaluate import evaluate
from cuadrilla.train.journal import read_records
from cuadrilla.train.setup import assemble
from cuadrilla.train.sinks import Sink
from tests.faults import Script, play
from tests.runs import RUN_FILE, execute, final_sha256, metrics, prepare, workers
from tests.sessions import FP32
from tests.tasks import Examples, RaggedRegression, Rescaled
from tests.transports import run_through

CRASHED = (Script(worker="worker-1", at=5, phase="pass"), Script(worker="worker-2", at=5, phase="pass"))
CREW = (workers([1.0, 1.0]), "sync.strict=true")


def crash(folder: Path, *sets: str) -> None:
    """A run of two workers that both died in step 6, so that five steps are only in the journal."""
    wrap, _ = play(*CRASHED)
    with pytest.raises(Exception, match="scripted"):
        execute(folder, RaggedRegression(), *CREW, *sets, wrap_link=wrap)
    assert [record.version for record in read_records(RunDir(folder).journal, 0, after=0)] == [1, 2, 3, 4, 5]


def test_a_journal_ends_where_the_newest_checkpoints_begin(tmp_path: Path) -> None:
    """The checkpoint of the best step is kept for ever, but not the journal after it."""
    execute(tmp_path, Worsens(), *CREW, "checkpoint.every_steps=1", "evaluate.every_tokens=1")
    run = RunDir(tmp_path)
    kept = [version_of(path) for path in list_checkpoints(run.checkpoints)]
    assert kept[0] == 1
    assert min(int(path.stem[1:]) for path in run.journal.glob("v*.step")) > kept[-2]


class Worsens(RaggedRegression):
    """A task whose first step is the best."""

    num_evaluations = 0

    def evaluate(self, model: nn.Module, batches: Iterator[Mapping[str, Tensor]]) -> dict[str, float]:
        self.num_evaluations += 1
        return {"loss": float(self.num_evaluations)}


class FailsOnce(RaggedRegression):
    """A task whose evaluation fails the first time, as if its author repaired it then."""

    failed = False

    def evaluate(self, model: nn.Module, batches: Iterator[Mapping[str, Tensor]]) -> dict[str, float]:
        if not self.failed:
            self.failed = True
            raise ValueError("a mistake in evaluate")
        return super().evaluate(model, batches)


@pytest.mark.parametrize("step", [3, 8])
def test_a_step_in_the_journal_gets_its_row_and_its_evaluation(tmp_path: Path, step: int) -> None:
    """The coordinator ended between journal and row. The last step is evaluated in any case."""
    sets = ("checkpoint.journal=on", f"evaluate.every_tokens={step * 72}")
    execute(tmp_path / "whole", RaggedRegression(), *sets)
    task = FailsOnce()
    with pytest.raises(ValueError, match="a mistake"):
        execute(tmp_path / "failed", task, *sets)
    assert [row["version"] for row in metrics(tmp_path / "failed")] == list(range(1, step))
    execute(tmp_path / "failed", task, *sets)
    assert timeless(tmp_path / "failed") == timeless(tmp_path / "whole")


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Rows of the metrics without the fields that depend on the machine's speed or on the workers."""
    clocks = ("seconds", "tokens_per_second", "workers", "shares")
    return [{key: value for key, value in row.items() if key not in clocks} for row in metrics(folder)]


NO_BEST = "evaluate.every_tokens=1_000_000"  # no evaluation on the way, so no checkpoint of a best version either


def test_other_settings_wait_until_the_journal_is_redone(tmp_path: Path) -> None:
    crash(tmp_path, NO_BEST)
    config = resolve(RUN_FILE, sets=[*CREW, "optim.lr=0.5"]).config
    with pytest.raises(ConfigError, match="must be redone"):
        assemble(config, RunDir(tmp_path), task=RaggedRegression(), sinks=[], allow_changes=True)
    execute(tmp_path, RaggedRegression(), *CREW, stop_at=1)
    run_through(assemble(config, RunDir(tmp_path), task=RaggedRegression(), sinks=[], allow_changes=True, stop_at=6))
    with pytest.raises(ConfigError, match=r"optim\.lr \(0\.5"):  # from now on it is trained with the new rate
        execute(tmp_path, RaggedRegression(), *CREW)


def test_a_journal_of_another_history_is_not_redone(tmp_path: Path) -> None:
    crash(tmp_path, NO_BEST)
    shutil.rmtree(RunDir(tmp_path).checkpoints)
    execute(tmp_path, RaggedRegression(), "run.seed=1", stop_at=3)
    execute(tmp_path, RaggedRegression(), "run.seed=1")
    execute(tmp_path / "other", RaggedRegression(), "run.seed=1")
    assert final_sha256(tmp_path) == final_sha256(tmp_path / "other")


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    sets = ("checkpoint.every_steps=1", "checkpoint.keep=2", NO_BEST)
    execute(tmp_path, RaggedRegression(), *sets, stop_at=4)
    damaged = list_checkpoints(RunDir(tmp_path).checkpoints)[-1]
    (damaged / "state.json").write_text("{}")
    assert execute(tmp_path, RaggedRegression(), *sets, stop_at=3).version == 3
    assert [version_of(path) for path in list_checkpoints(RunDir(tmp_path).checkpoints)] == [3]
    execute(tmp_path, RaggedRegression(), *sets, stop_at=4)
    assert [version_of(path) for path in list_checkpoints(RunDir(tmp_path).checkpoints)] == [3, 4]


class Stateful(RaggedRegression):
    """A model that an evaluation could change: running statistics, dropout. The task keeps the requested splits."""

    def __init__(self) -> None:
        super().__init__()
        self.splits: list[str] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def data(self, split: Literal["train", "val"]) -> Examples:
        self.splits.append(split)
        return super().data(split)


def test_evaluating_trains_nothing_and_reads_held_out_data_only() -> None:
    task = Stateful()
    model = task.model()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = [evaluate(task, model, sequences=64, device=torch.device("cpu"), precision=FP32) for _ in range(2)]
    assert task.splits == ["val", "val"]
    assert found[0] == found[1]  # no dropout
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training


def test_schedule_and_evaluation_follow_planned_tokens(tmp_path: Path) -> None:
    execute(tmp_path / "heavy", Rescaled(100, tokens=100), "evaluate.every_tokens=144")
    execute(tmp_path / "light", RaggedRegression(), "evaluate.every_tokens=144")
    heavy, light = (metrics(tmp_path / name) for name in ("heavy", "light"))
    assert [row["lr_factor"] for row in heavy] == [row["lr_factor"] for row in light]
    assert heavy[-1]["lr_factor"] == 0.0
    assert [row["version"] for row in heavy if "val_loss" in row] == [2, 4, 6, 8]


def test_a_status_that_cannot_be_written_does_not_stop_a_run(tmp_path: Path) -> None:
    RunDir(tmp_path).status.mkdir()
    assert execute(tmp_path, RaggedRegression()).complete


def test_a_disk_that_fails_for_a_while_alarms_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fsync of steps 3 to 5 fails, as with a quota, a bad sector or a lost network share."""
    sets = (*CREW, "checkpoint.every_steps=1", NO_BEST)
    execute(tmp_path / "whole", RaggedRegression(), *sets)
    fsync, failing = os.fsync, threading.Event()

    def refuse(descriptor: int) -> None:
        if failing.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    class Weather(Sink):
        """Let the disk fail or not, by the step."""

        def log(self, step: int, _scalars: object) -> None:
            failing.set() if 2 <= step < 5 else failing.clear()

    monkeypatch.setattr(os, "fsync", refuse)
    outcome = run_through(prepare(tmp_path / "crew", RaggedRegression(), *sets, sinks=[Weather()]))
    assert outcome.complete
    assert final_sha256(tmp_path / "crew") == final_sha256(tmp_path / "whole")
    alarms = [row["message"] for row in read_jsonl(RunDir(tmp_path / "crew").events) if row["event"] == "alarm"]
    assert alarms
    assert all(os.strerror(errno.ENOSPC) in message for message in alarms)


@pytest.mark.parametrize(("fsync_seconds", "versions"), [(10.0, [0, 20]), (0.0, [*range(21)])])
def test_a_slow_disk_gets_fewer_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync_seconds: float, versions: list[int]
) -> None:
    """A step takes a second, and each fsync of a save `fsync_seconds`. Saving takes at most 2 % of the time."""
    now = [0.0]
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        now[0] += fsync_seconds
        fsync(descriptor)

    class Clock(Sink):
        def log(self, _step: int, _scalars: object) -> None:
            now[0] += 1.01

    monkeypatch.setattr(os, "fsync", slow)
    sets = ("checkpoint.every_seconds=1", "train.steps=20", NO_BEST)
    context = prepare(tmp_path, RaggedRegression(), *sets, sinks=[Clock()])
    context.store.clock = lambda: now[0]
    assert run_through(context).complete
    saved = [row["version"] for row in read_jsonl(RunDir(tmp_path).events) if row["event"] == "checkpoint"]
    assert saved == versions
