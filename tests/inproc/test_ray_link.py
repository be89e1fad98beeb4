"""What a worker's link through Ray keeps, beside the shared batteries, which go through it as through the others."""

import pytest
import torch

from cuadrilla.link import wire
from cuadrilla.link.base import Version
from cuadrilla.link.offer import RunDescription
from cuadrilla.link.wire import Layout
from tests.doors import Run


@pytest.mark.parametrize("door", ["ray"], indirect=True)
def test_a_version_that_is_announced_before_the_one_before_is_fetched(door: Run) -> None:
    """A worker without a lease hears of versions faster than it reads them."""
    import ray

    from cuadrilla.engines.ray.worker import Place, RayLink, RayWorker, arrays_of

    actor, layout = RayWorker(Place(name="ana"), RunDescription(config="", files=())), Layout.of({"w": torch.zeros(2)})
    for version in (1, 2, 3):
        message = wire.to_worker(Version(version=version, parameters=None), parameters=wire.version_name(version))
        refs = (ray.put(arrays_of({"w": torch.full((2,), float(version))})),)
        actor.deliver(message.SerializeToString(), refs)
    link = RayLink(actor._mail, parameters=layout)
    assert [link.download(f"version-{version}")["w"].tolist() for version in (2, 3)] == [[2.0, 2.0], [3.0, 3.0]]
    assert list(actor._mail.versions) == ["version-3"]  # memory of the object store is given back
