"""Machines and a free port, for the tests of crews."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], Machine]]:
    machines: dict[str, Machine] = {}

    def get(name: str) -> Machine:
        return machines.setdefault(name, Machine(tmp_path / name))

    yield get
    for each in machines.values():
        each.stop()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Machine]:
    yield from talking(tmp_path / "coordinator")


@pytest.fixture
def ana(tmp_path: Path) -> Iterator[Machine]:
    yield from talking(tmp_path / "ana")


@pytest.fixture
def luis(tmp_path: Path) -> Iterator[Machine]:
    yield from talking(tmp_path / "luis")


def talking(home: Path) -> Iterator[Machine]:
    """Its processes say what they say into a file."""
    made = Machine(home, talk=home.with_suffix(".txt"))
    yield made
    made.stop()
