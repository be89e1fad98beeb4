"""What the training loop asks of a link, and what it says of the time that this took."""

import time
from dataclasses import replace

import torch

from cuadrilla.config import RunSection, TrainSection
from cuadrilla.link.base import Lease, Stop, TensorRef, Tensors, ToWorker, Version
from cuadrilla.train.loop import WorkerSettings, train
from tests.sessions import FP32, Led, worker_half
from tests.tasks import RaggedRegression

TRANSFER_SECONDS = 0.3


class SlowLink(Led):
    """A download takes a while, an upload no time."""

    downloads = 0

    def download(self, ref: TensorRef) -> Tensors:
        self.downloads += 1
        time.sleep(TRANSFER_SECONDS)
        return super().download(ref)


def led(*events: ToWorker) -> SlowLink:
    task = RaggedRegression()
    model = task.model()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    link = SlowLink(*(replace(event, parameters=weights) if isinstance(event, Version) else event for event in events))
    settings = WorkerSettings(run=RunSection(), train=TrainSection(), device=torch.device("cpu"), precision=FP32)
    train(link, task=task, model=model, sync=worker_half(model), worker=settings)
    return link


def lease(number: int) -> Lease:
    return Lease(lease_id=number, version=1, units=(number,), planned_tokens=8)


def test_a_further_lease_of_a_version_costs_no_transfer() -> None:
    """Or its worker would seem to compute in no time."""
    first, second = led(Version(version=1), lease(1), lease(2), Stop(reason="")).answers
    assert first.transfer_seconds >= TRANSFER_SECONDS
    assert second.transfer_seconds < TRANSFER_SECONDS / 3


def test_who_is_leased_nothing_downloads_nothing() -> None:
    link = led(Version(version=0), Version(version=1), lease(1), Version(version=2), Stop(reason=""))
    assert link.downloads == 1
