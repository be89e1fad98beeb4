"""A crew for the tests of the crew link, a web server, a downloader and a trained model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.downloader import Downloader
from tests.hostile import Crew
from tests.models import trained_language_run
from tests.web import Server, serving


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path)
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
    return trained_language_run(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def folder(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the runs of a file, with prepared `data`."""
    made = tmp_path_factory.mktemp("runs")
    (made / "data").symlink_to(stories)
    return made
