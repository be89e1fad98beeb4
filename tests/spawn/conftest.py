"""Machines, a free port and a Ray cluster for the tests of crews; books, and a folder prepared from them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.rundir import RunDir
from tests.books import write_books
from tests.commands import wait_for
from tests.machines import Machine, Machines, language_run
from tests.ports import free_port
from tests.ray_cluster import RayNode


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machines]:
    machines: dict[str, Machine] = {}

    def get(name: str) -> Machine:
        return machines.setdefault(name, Machine(tmp_path / name))

    yield get
    for each in machines.values():
        each.stop()


@pytest.fixture
def run(tmp_path: Path, stories: Path) -> RunDir:
    """A strict, endless run of a small GPT-2, which is not started."""
    return language_run(tmp_path / "run", stories)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def measured_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process measure the machine's speed for only tenths of a second, less accurately."""
    monkeypatch.setattr("cuadrilla.train.measure.LEASE_SECONDS", 0.1)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNode]:
    """A Ray head with two CPUs and two pretended GPUs. It ends with the module, since other tests count children."""
    head = RayNode(tmp_path_factory.mktemp("cluster"), cards=2)
    wait_for(head.listens)
    yield head
    assert head.runs()
    head.stop()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Books of the size of a batch, some short books, and a copy of one with small changes."""
    folder = tmp_path_factory.mktemp("text") / "libros"
    write_books(folder, num_books=30, characters=80_000, seed=1)
    write_books(folder / "cortos", num_books=20, characters=8_000, seed=2)
    changed = (folder / "cortos" / "libro3.txt").read_text().replace("sol", "luna", 3)
    (folder / "cortos" / "libro3b.txt").write_text(changed)
    return folder


@pytest.fixture(scope="session")
def prepared(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that one process prepares from the library."""
    out = tmp_path_factory.mktemp("one") / "out"
    prepare([str(library)], out=out, options=PrepareOptions(vocab=300, processes=1))
    return out


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Machine]:
    yield from talking(tmp_path / "coordinator")


@pytest.fixture
def ana(tmp_path: Path) -> Iterator[Machine]:
    yield from talking(tmp_path / "ana")


def talking(home: Path) -> Iterator[Machine]:
    """A machine whose processes write their output into a file."""
    made = Machine(home, talk=home.with_suffix(".txt"))
    yield made
    made.stop()
