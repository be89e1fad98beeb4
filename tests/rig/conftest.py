"""A network of namespaces, machines on it, what `doctor` finds there, and a run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.rundir import RunDir
from tests.lan import Member, lan
from tests.machines import Machine, language_run
from tests.networks import RATE, need_namespaces

IMPATIENT = "from cuadrilla.cli import main; from cuadrilla.doctor import here; here.DEVICES_SECONDS = 0.1; main()"


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    """Two machines on a switch, or as many as the file's NUM_MACHINES says."""
    need_namespaces()
    with lan(getattr(request.module, "NUM_MACHINES", 2), rate=RATE) as members:
        yield members


@pytest.fixture
def machines(network: list[Member], tmp_path: Path) -> Iterator[list[Machine]]:
    """A machine on each member of `network`."""
    made = [
        Machine(tmp_path / f"home-{index}", prefix=member.prefix, address=member.address)
        for index, member in enumerate(network)
    ]
    yield made
    for machine in made:
        machine.stop()


def findings(machine: Machine, *arguments: str) -> list[dict[str, Any]]:
    """All findings of `doctor` on a machine, without waiting for torch."""
    command = [*machine.prefix, sys.executable, "-c", IMPATIENT, "doctor", "--json", *arguments]
    done = subprocess.run(command, env=machine.environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return rows


@pytest.fixture
def run(tmp_path: Path, stories: Path) -> RunDir:
    return language_run(tmp_path / "run", stories)
