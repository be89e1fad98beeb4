"""Doors for the tests of the crew link."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile import BIG, Crew


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
