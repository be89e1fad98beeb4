"""Running statistics of any crew, even if resumed, crashed, skipped or rolled back, are those of one worker."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cuadrilla.errors import TaskError
from cuadrilla.model.weights import WEIGHTS, read_tensors
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.sync.statistics import statistics_of
from tests.inproc.test_recovery import NO_BEST
from tests.runs import UNEQUAL, execute, final, final_sha256, metrics, relative_difference, workers
from tests.tasks import Normalised, RaggedRegression

STRICT = "sync.strict=true"
STATISTICS = statistics_of(Normalised().model()).keys()
COUNTS = ("0.num_batches_tracked", "2.num_batches_tracked")


def values(folder: Path) -> dict[str, Tensor]:
    """The statistics of the newest checkpoint, without their counts, which are much larger numbers."""
    return {name: tensor for name, tensor in final(folder).items() if name in STATISTICS and name not in COUNTS}


def test_unequal_workers_equal_one_worker(tmp_path: Path) -> None:
    sets = ('optim.kind="adamw"', "optim.lr=0.003", "train.steps=20")
    execute(tmp_path / "one", Normalised(), *sets)
    execute(tmp_path / "crew", Normalised(), *sets, workers(UNEQUAL["three unequal"]))
    assert relative_difference(final(tmp_path / "crew"), final(tmp_path / "one")) <= 1e-6
    assert relative_difference(values(tmp_path / "crew"), values(tmp_path / "one")) <= 1e-6
    held_out = [row["val_loss"] for row in metrics(tmp_path / "one") if "val_loss" in row]
    assert held_out[-1] < held_out[0]


def test_strict_has_the_same_bits_for_any_crew(tmp_path: Path) -> None:
    for crew, speeds in UNEQUAL.items():
        execute(tmp_path / crew, Normalised(), STRICT, workers(speeds))
    assert len({final_sha256(tmp_path / crew) for crew in UNEQUAL}) == 1
    assert [int(final(tmp_path / "one")[name]) for name in COUNTS] == [8, 8]


class Spiking(Normalised):
    """From step 41 on every loss is a billion times too large. A step has 24 units, a pass each; three were trials."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        return (loss * 1e9 if self.num_losses > 3 + 40 * 24 else loss), count


@pytest.mark.parametrize(("stop_at", "saved", "event"), [(41, 40, "update skipped"), (43, 30, "rolled back")])
def test_a_skipped_update_leaves_them_and_a_roll_back_takes_the_old_ones(
    tmp_path: Path, stop_at: int, saved: int, event: str
) -> None:
    sets = (NO_BEST, "train.steps=80", f"checkpoint.every_steps={saved}", "checkpoint.keep=9")
    execute(tmp_path, Spiking(), *sets, stop_at=stop_at)
    kinds = [row["event"] for row in read_jsonl(RunDir(tmp_path).events)]
    assert any(kind.startswith(event) for kind in kinds)
    before = read_tensors(RunDir(tmp_path).checkpoints / f"v{saved:08d}" / WEIGHTS)
    assert [int(before[name]) for name in COUNTS] == [saved, saved]
    after = final(tmp_path)
    assert all(torch.equal(after[name], before[name]) for name in before)


class Counting(nn.Module):
    """A model that counts its passes in a saved buffer, and has a cache in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = RaggedRegression().model()
        self.register_buffer("num_passes", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_passes += self.training
        self.cache = x.sum()
        return self.inner(x)


class CountingTask(RaggedRegression):
    def model(self) -> nn.Module:
        return Counting()


def test_a_buffer_that_is_not_merged_is_refused_with_several_workers(tmp_path: Path) -> None:
    """Each worker would train with its own values, without notice."""
    with pytest.raises(TaskError, match="a forward pass changes the buffer num_passes"):
        execute(tmp_path / "crew", CountingTask(), workers(UNEQUAL["two equal"]))
    execute(tmp_path / "one", CountingTask())
    assert float(final(tmp_path / "one")["num_passes"]) > 0
