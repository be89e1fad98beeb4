"""An evaluation beside the run: a crew goes on committing, and the best version is kept although others came since."""

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from torch import Tensor, nn

from cuadrilla.rundir import RunDir, append_lines, last_rows, read_jsonl
from cuadrilla.train.checkpoint import choose_step, list_checkpoints, load_checkpoint, tensors_sha256
from cuadrilla.train.coordinate import Outcome
from cuadrilla.train.sinks import JsonlSink, Scalars
from tests.runs import metrics, prepare, workers
from tests.tasks import RaggedRegression
from tests.transports import run_through

EVALUATED, STEPS, GOES_ON = 4, 12, 7
CREW = (workers([1.0, 1.0]), f"train.steps={STEPS}", "evaluate.every_tokens=288")


class SlowEvaluation(RaggedRegression):
    """The first evaluation ends when the run has gone on for some steps, or not at all. `losses`: what each finds."""

    def __init__(self, *losses: float, fails: bool = False) -> None:
        super().__init__()
        self.losses = list(losses)
        self.fails = fails
        self.gone_on = threading.Event()
        self.seen: list[str] = []

    def evaluate(self, model: nn.Module, batches: Iterator[Mapping[str, Tensor]]) -> dict[str, float]:
        self.seen.append(tensors_sha256(model.state_dict()))
        assert self.gone_on.wait(60), "the run waits for its evaluation"
        if self.fails:
            raise ValueError("no held-out data today")
        return {"loss": self.losses.pop(0)}


class Watch:
    """A sink: lets the evaluation end."""

    def __init__(self, task: SlowEvaluation) -> None:
        self.task = task

    def log(self, step: int, _scalars: Scalars) -> None:
        if step >= GOES_ON:
            self.task.gone_on.set()

    def close(self) -> None:
        """Nothing is open."""


def train(folder: Path, task: SlowEvaluation, *sets: str) -> Outcome:
    folder.mkdir()
    sink = JsonlSink(RunDir(folder).metrics)
    try:
        return run_through("grpc", prepare(folder, task, *CREW, *sets, sinks=[sink, Watch(task)]))
    finally:
        sink.close()


def test_a_crew_goes_on_while_it_is_evaluated(tmp_path: Path) -> None:
    outcome = train(tmp_path / "run", SlowEvaluation(2.0, 1.5, 1.0))
    assert (outcome.version, outcome.best) == (STEPS, STEPS)
    order = [row["version"] for row in read_jsonl(RunDir(tmp_path / "run").metrics)]
    assert order.count(EVALUATED) == 2
    assert order.index(GOES_ON) < len(order) - 1 - order[::-1].index(EVALUATED)  # its row comes again, later
    rows = metrics(tmp_path / "run")
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["version"]: row["val_loss"] for row in rows if "val_loss" in row} == {4: 2.0, 8: 1.5, 12: 1.0}
    assert all("loss" in row and "tokens_per_second" in row for row in rows)


def test_the_best_version_stays_although_it_is_known_late(tmp_path: Path) -> None:
    """Only the two newest checkpoints are kept, and each step makes one."""
    task = SlowEvaluation(1.0, 3.0, 2.0)
    outcome = train(tmp_path / "run", task, "checkpoint.keep=2", "checkpoint.every_steps=1")
    assert outcome.best == EVALUATED
    found = choose_step(RunDir(tmp_path / "run"))
    assert (found.version, found.newest) == (EVALUATED, STEPS)
    assert found.path is not None
    assert tensors_sha256(load_checkpoint(found.path).model) == task.seen[0]


def test_an_evaluation_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no held-out data today"):
        train(tmp_path / "run", SlowEvaluation(fails=True))


@pytest.mark.parametrize(
    ("row", "best"),
    [
        ({"version": EVALUATED, "val_loss": 0.5}, EVALUATED),
        ({"version": EVALUATED, "val_loss": 5.0}, STEPS),
        ({"version": STEPS + 1, "val_loss": 0.5}, STEPS),
        ({"version": EVALUATED, "val_loss": "0.5"}, STEPS),
        ({"version": EVALUATED, "val_loss": None}, STEPS),
    ],
)
def test_what_the_rows_say(tmp_path: Path, row: dict[str, object], best: int) -> None:
    """A better version up to the newest counts; anything else is as if it were not there."""
    train(tmp_path / "run", SlowEvaluation(3.0, 2.0, 1.0), "checkpoint.keep=99", "checkpoint.every_steps=1")
    run = RunDir(tmp_path / "run")
    assert len(list_checkpoints(run.checkpoints)) > STEPS - 2
    append_lines(run.metrics, json.dumps(row) + "\n")
    assert choose_step(run).version == best


def test_a_resumed_run_knows_what_was_found(tmp_path: Path) -> None:
    """The coordinator ended after the evaluation, and before another checkpoint was written."""
    task = SlowEvaluation(1.0, 3.0, 2.0)
    train(tmp_path / "run", task, "checkpoint.every_steps=1", "checkpoint.keep=99")
    run = RunDir(tmp_path / "run")
    again = prepare(run.path, SlowEvaluation(1.0), *CREW)
    try:
        assert again.store.held_out.best == (1.0, EVALUATED)
    finally:
        again.store.close()
    assert last_rows(run.metrics)[EVALUATED - 1]["val_loss"] == 1.0
