"""Gradient checkpointing of a model of one's own: the same run, whoever computes."""

from pathlib import Path

import pytest
from torch import nn

from tests.runs import execute, final_sha256, workers
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


def test_unequal_workers_draw_the_same_random_numbers_twice(tmp_path: Path) -> None:
    """In threads of one process, which share torch's generator, and in strict mode, where no bit may differ."""
    execute(tmp_path / "one", Deep(dropout=0.3), "sync.strict=true")
    execute(tmp_path / "crew", Deep(dropout=0.3), "sync.strict=true", THRIFTY, workers([1.0, 0.5, 0.25]))
    assert final_sha256(tmp_path / "crew") == final_sha256(tmp_path / "one")
