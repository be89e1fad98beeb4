"""Containers, networks and projects of compose that end with the test, whatever has happened in it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images import Missing, build, docker
from tests.inside import cuadrilla

NAMES = f"cua-{os.getpid()}"
GRACE_SECONDS = "20"


@pytest.fixture(scope="session")
def image() -> str:
    """The image's name, without the tag `cpu`. Building it takes minutes the first time."""
    try:
        return build()
    except Missing as missing:
        pytest.skip(str(missing))


class Containers:
    """On a network of their own, where each is found by its short name."""

    def __init__(self, image: str) -> None:
        self._image = f"{image}:cpu"
        self._started: list[str] = []
        self._network = f"{NAMES}-network"
        docker("network", "create", self._network)

    def start(self, name: str, *command: str) -> str:
        """Its full name."""
        full = f"{NAMES}-{name}"
        self._started.append(full)
        place = ("--network", self._network, "--network-alias", name, "--shm-size", "1g")
        docker("run", "--detach", "--name", full, *place, self._image, *command)
        return full

    def run(self, *command: str, options: tuple[str, ...] = ()) -> str:
        """What a container that ends well prints."""
        name = f"{NAMES}-run"
        self._started.append(name)
        return docker("run", "--rm", "--name", name, "--network", self._network, *options, self._image, *command)

    def close(self) -> None:
        for name in self._started:
            subprocess.run(["docker", "rm", "--force", "--volumes", name], capture_output=True, check=False)
        subprocess.run(["docker", "network", "rm", self._network], capture_output=True, check=True)


@pytest.fixture
def containers(image: str) -> Iterator[Containers]:
    made = Containers(image)
    yield made
    made.close()


class Project:
    """A folder with the files of `cuadrilla compose`, and what runs of them."""

    def __init__(self, folder: Path, *, image: str, command: list[str]) -> None:
        self.folder = folder
        self.name = f"{NAMES}-project"
        self._command = [*command, "-p", self.name]
        self._variables = {**os.environ, "CUADRILLA_IMAGE": image}

    def compose(self, *arguments: str, **variables: str) -> str:
        """What a command of compose that succeeds prints."""
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=self.folder, env=self._variables | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def containers(self, service: str) -> list[str]:
        """Ids, also of those that have ended."""
        labels = (f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}")
        return docker("ps", "-aq", *(word for label in labels for word in ("--filter", f"label={label}"))).split()

    def close(self) -> None:
        every = [
            word
            for role in ("coordinator", "worker", "trainer", "ray", "dask", "tensorboard", "serve")
            for word in ("--profile", role)
        ]
        self.compose(*every, "down", "--volumes", "--remove-orphans", "--timeout", GRACE_SECONDS)


@pytest.fixture
def project(image: str, tmp_path: Path) -> Iterator[Project]:
    """The port of its crew is on a loopback address of this process: others may have theirs."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    if not plugin and shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose, or the plugin `docker compose`")
    folder = tmp_path / "project"
    folder.mkdir()
    pid = os.getpid()
    address = f"127.{pid >> 16 & 255}.{pid >> 8 & 255}.{pid & 255}"
    done = cuadrilla("compose", "--to", folder, "--lan", address)
    assert done.returncode == 0, done.stderr
    made = Project(folder, image=image, command=["docker", "compose"] if plugin else ["docker-compose"])
    yield made
    made.close()
