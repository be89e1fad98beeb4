"""Machines, a free port and a little prepared text, for the tests of crews."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cuadrilla.data.options import Options
from cuadrilla.data.prepare import prepare
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(["cuentos:300"], out=folder, options=Options(vocab=512))
    return folder
