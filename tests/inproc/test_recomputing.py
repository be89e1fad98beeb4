"""Gradient checkpointing of a model of one's own: the same run, whoever computes and however often it is stopped."""

from pathlib import Path

import pytest
from torch import nn

from cuadrilla.errors import TaskError
from cuadrilla.model import blocks
from tests.runs import execute, final_sha256, prepare, workers
from tests.tasks import RaggedRegression

pytestmark = pytest.mark.inproc

THRIFTY = "model.gradient_checkpointing=true"


class Deep(RaggedRegression):
    """With dropout inside its blocks."""

    def model(self) -> nn.Module:
        middle = [
            nn.Sequential(nn.Linear(self.width, self.width), nn.GELU(), nn.Dropout(self.dropout)) for _ in range(3)
        ]
        return nn.Sequential(nn.Linear(12, self.width), nn.Sequential(*middle), nn.Linear(self.width, 1))


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Blocks that were computed twice."""
    found: list[nn.Module] = []
    inner = blocks.checkpoint

    def counting(function, *arguments, **settings):
        found.append(function.__self__)
        return inner(function, *arguments, **settings)

    monkeypatch.setattr(blocks, "checkpoint", counting)
    return found


def test_a_run_has_the_same_bits_and_may_begin_without(tmp_path: Path, recomputed: list[nn.Module]) -> None:
    execute(tmp_path / "plain", Deep(dropout=0.3))
    assert not recomputed
    execute(tmp_path / "thrifty", Deep(dropout=0.3), THRIFTY)
    assert len(set(map(id, recomputed))) == 3
    execute(tmp_path / "later", Deep(dropout=0.3), stop_at=4)
    execute(tmp_path / "later", Deep(dropout=0.3), THRIFTY)
    assert final_sha256(tmp_path / "thrifty") == final_sha256(tmp_path / "plain")
    assert final_sha256(tmp_path / "later") == final_sha256(tmp_path / "plain")


def test_unequal_workers_draw_the_same_random_numbers_twice(tmp_path: Path) -> None:
    """In threads of one process, which share torch's generator, and in strict mode, where no bit may differ."""
    execute(tmp_path / "one", Deep(dropout=0.3), "sync.strict=true")
    execute(tmp_path / "crew", Deep(dropout=0.3), "sync.strict=true", THRIFTY, workers([1.0, 0.5, 0.25]))
    assert final_sha256(tmp_path / "crew") == final_sha256(tmp_path / "one")


def test_a_model_without_blocks_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no list of alike blocks"):
        prepare(tmp_path / "run", RaggedRegression(), THRIFTY)
    assert not (tmp_path / "run" / "checkpoints").exists()
