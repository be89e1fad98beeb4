"""The training loop: its calls to the link, the transfer times that it reports, and the lengths of its passes."""

import pytest
import torch

from cuadrilla.config import RunSection, TrainSection
from cuadrilla.link.base import Lease, Stop, TensorRef, Tensors, Version
from cuadrilla.model.task import TaskDefaults
from cuadrilla.train import loop
from cuadrilla.train.loop import WorkerSettings, max_pass_sequences, train
from cuadrilla.train.precision import PASS_TOKENS
from tests.clock import Clock
from tests.sessions import FP32, Led, worker_half
from tests.tasks import RaggedRegression


def test_a_version_is_downloaded_once_and_for_a_lease_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second lease of the same version reports no transfer time, else its computing would seem to take no time."""
    clock = Clock()

    class SlowLink(Led):
        def download(self, ref: TensorRef) -> Tensors:
            clock.spend(3.0)
            return super().download(ref)

    task = RaggedRegression()
    model = task.model()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    idle, first, last = (Version(version=number, parameters=weights) for number in (0, 1, 2))
    leases = [Lease(lease_id=number, version=1, units=(number,), planned_tokens=8) for number in (1, 2)]
    link = SlowLink(idle, first, *leases, last, Stop(reason=""))
    settings = WorkerSettings(run=RunSection(), train=TrainSection(), device=torch.device("cpu"), precision=FP32)
    monkeypatch.setattr(loop.time, "monotonic", clock)
    train(link, task=task, model=model, sync=worker_half(model), worker=settings)
    assert [answer.transfer_seconds for answer in link.answers] == [3.0, 0.0]
    assert clock.now == 3.0


@pytest.mark.parametrize(
    ("length", "device", "settings", "expected"),
    [
        (256, "cpu", {}, PASS_TOKENS // 256),
        (10 * PASS_TOKENS, "cpu", {}, 1),
        (1, "cpu", {}, 64),
        (256, "cuda", {}, 64),
        (256, "cpu", {"pass_sequences": 3}, 3),
    ],
)
def test_so_many_sequences_in_a_pass(length: int, device: str, settings: dict[str, int], expected: int) -> None:
    task = RaggedRegression()
    task.defaults = TaskDefaults(length=length)
    section = TrainSection(steps=1, batch_sequences=64, **settings)
    worker = WorkerSettings(run=RunSection(), train=section, device=torch.device(device), precision=FP32)
    assert max_pass_sequences(task, worker) == expected
