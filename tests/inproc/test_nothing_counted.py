"""Examples without a target that counts (all are masked) have no weight; a step of only such examples is skipped."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from cuadrilla.rundir import RunDir, read_jsonl
from tests.runs import execute, final, final_sha256, metrics, prepare, workers
from tests.tasks import Examples, RaggedRegression

STEPS = 8
SMALL = ("train.batch_sequences=6", "train.unit_sequences=2", f"train.steps={STEPS}")


class Masked(RaggedRegression):
    """A task in which only a `part` of the training examples counts."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self.part = part

    def data(self, split: Literal["train", "val"]) -> Examples:
        examples = super().data(split)
        if split == "train":
            examples.count *= np.random.default_rng(5).random(len(examples)) < self.part
        return examples


def skipped(folder: Path) -> list[int]:
    return [row["version"] for row in read_jsonl(RunDir(folder).events) if row["event"] == "update skipped"]


def test_a_run_of_which_nothing_counts_changes_nothing(tmp_path: Path) -> None:
    """The run goes to its end, reports each step as skipped, and changes no weight."""
    start = prepare(tmp_path / "start", Masked(0.0), *SMALL)
    execute(tmp_path / "run", Masked(0.0), workers([1.0, 0.5]), *SMALL)
    assert skipped(tmp_path / "run") == [*range(1, STEPS + 1)]
    assert [(row["tokens"], row["loss"]) for row in metrics(tmp_path / "run")] == [(0, None)] * STEPS
    begun = start.model.state_dict()
    assert all(torch.equal(tensor, begun[name]) for name, tensor in final(tmp_path / "run").items())
    start.store.close()


def test_steps_of_which_nothing_counts_are_no_steps_whoever_computes_them(tmp_path: Path) -> None:
    for name, speeds in (("one", [1.0]), ("three", [1.0, 0.5, 0.25])):
        execute(tmp_path / name, Masked(0.1), workers(speeds), "sync.strict=true", *SMALL)
    assert final_sha256(tmp_path / "three") == final_sha256(tmp_path / "one")
    rows, empty = metrics(tmp_path / "three"), skipped(tmp_path / "three")
    assert 0 < len(empty) < STEPS
    counted = [row["tokens"] - before for row, before in zip(rows, [0, *(row["tokens"] for row in rows)], strict=False)]
    assert [row["version"] for row, tokens in zip(rows, counted, strict=True) if not tokens] == empty
    assert [row["version"] for row in rows if row["loss"] is None] == empty
