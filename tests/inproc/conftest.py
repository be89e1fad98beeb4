"""Transports for the shared batteries, crews for the tests of the crew link, a web server, a trained model."""

import gc
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests import runs
from tests.downloader import Downloader
from tests.hostile import BIG, Crew
from tests.models import language_run
from tests.runs import Execute
from tests.transports import IN_THREADS, Run
from tests.web import Server, serving

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"')
NUM_ACTORS = 3


@pytest.fixture(scope="package", params=[pytest.param("ray", marks=NEEDS_RAY), *IN_THREADS])
def transport(request: pytest.FixtureRequest) -> Iterator[str | Run]:
    """pytest takes the tests by transport. Ray comes first: it is started once, and ends when the next one begins."""
    if request.param != "ray":
        yield request.param
        return
    from cuadrilla.engines.ray import cluster

    with cluster.started(host=cluster.LOOPBACK, num_workers=NUM_ACTORS, practice=True):
        from tests.ray_transport import RayTransport

        yield RayTransport(num_workers=NUM_ACTORS)
    with warnings.catch_warnings():  # Ray does not wait for the processes that it has ended
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def execute(transport: str | Run) -> Execute:
    """Through each transport in turn, with at most NUM_ACTORS workers."""
    return partial(runs.execute, transport=transport)


@pytest.fixture(params=IN_THREADS)
def execute_in_threads(request: pytest.FixtureRequest) -> Execute:
    """For what needs more workers, or the memory of this process."""
    return partial(runs.execute, transport=request.param)


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path)
    yield made
    made.close()


@pytest.fixture
def big_crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path, contribution=BIG)
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture
def pull(tmp_path: Path) -> Downloader:
    return Downloader(tmp_path / "corpus")


@pytest.fixture(scope="session")
def language(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A trained run of a small language model. Read only."""
    return language_run(tmp_path_factory.mktemp("language"))
