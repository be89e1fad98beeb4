"""Machines and a run on whatever network a file of this folder makes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lan import Member
from cuadrilla.rundir import RunDir
from tests.machines import Machine, language_run


@pytest.fixture
def machines(network: list[Member], tmp_path: Path) -> Iterator[list[Machine]]:
    """One on each member of `network`."""
    made = [
        Machine(tmp_path / f"home-{index}", prefix=member.prefix, address=member.address)
        for index, member in enumerate(network)
    ]
    yield made
    for machine in made:
        machine.stop()


@pytest.fixture
def run(tmp_path: Path, stories: Path) -> RunDir:
    return language_run(tmp_path / "run", stories)
