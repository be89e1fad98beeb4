"""Doors for the tests of the crew link, and a trained language model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.hostile import BIG, Crew
from tests.models import language_run


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


@pytest.fixture(scope="session")
def language(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A trained run of a small language model. Read only."""
    return language_run(tmp_path_factory.mktemp("language"))
