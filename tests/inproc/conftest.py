"""Doors for the tests of the crew link, a web server for those of downloads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile import BIG, Crew
from tests.puller import Puller
from tests.web import Server, serving


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
def pull(tmp_path: Path) -> Puller:
    return Puller(tmp_path / "corpus")
