"""The shared battery for the exact strategy through the Ray door: the tests of `test_exact.py`, over real actors."""

import gc
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from cuadrilla.engines.ray import cluster
from cuadrilla.link import wire
from cuadrilla.link.base import Version
from cuadrilla.link.offer import RunDescription
from cuadrilla.link.wire import Layout
from tests import runs
from tests.doors import Run
from tests.inproc.test_exact import (  # noqa: F401 - collected here again, with the fixture below
    test_a_broken_contribution_never_reaches_the_weights,
    test_a_flipped_bit_is_found_and_its_units_are_computed_elsewhere,
    test_a_run_resumes_with_another_number_of_workers,
    test_a_worker_lost_at_any_phase_changes_nothing,
    test_a_worker_that_keeps_sending_nonsense_is_quarantined,
    test_bad_data_is_skipped_and_named,
    test_run_10_equals_run_5_and_resume_5,
    test_strict_has_the_same_bits_for_any_crew,
    test_the_death_of_the_last_worker_ends_the_run,
    test_unequal_workers_equal_one_worker,
    undisturbed,
)
from tests.inproc.test_statistics import test_strict_has_the_same_bits_for_any_crew as test_statistics_too  # noqa: F401
from tests.runs import Execute

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"')


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("ray")
    with cluster.started(private=folder, host=cluster.LOOPBACK, num_workers=3, practice=True):
        from tests.ray_door import RayDoor

        yield RayDoor(num_workers=3)
    with warnings.catch_warnings():  # Ray does not wait for the processes that it has ended
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def execute(door: Run) -> Execute:
    return partial(runs.execute, door=door)


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
