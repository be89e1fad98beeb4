"""Containers, networks and compose projects, which are removed after the test, even if it failed."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images import MADE_FROM, ROOT, Missing, build, docker

NAMES = f"cua-{os.getpid()}"
GRACE_SECONDS = "1"  # the test is over, and nothing is left to save
SOMEBODY = 4321
ONE_CORE = "services: {trainer: {cpus: 1.0}, coordinator: {cpus: 1.0}, worker: {cpus: 1.0}}\n"
CLONE = (*MADE_FROM, "compose.yaml", "compose.gpu.yaml", "examples", "recipes")


@pytest.fixture(scope="session")
def image() -> str:
    """The image's name, without the tag `cpu`. Building it takes minutes the first time."""
    try:
        return build()
    except Missing as missing:
        pytest.skip(str(missing))


class Containers:
    """Containers on their own network, on which they find each other by their short names."""

    def __init__(self, image: str) -> None:
        self._image = f"{image}:cpu"
        self._network = f"{NAMES}-network"
        docker("network", "create", self._network)

    def run(self, *command: str, options: tuple[str, ...] = ()) -> str:
        """Run a container, which must succeed, and return its output."""
        return docker(
            "run", "--rm", "--name", f"{NAMES}-run", "--network", self._network, *options, self._image, *command
        )

    def close(self) -> None:
        subprocess.run(["docker", "rm", "--force", "--volumes", f"{NAMES}-run"], capture_output=True, check=False)
        subprocess.run(["docker", "network", "rm", self._network], capture_output=True, check=True)


@pytest.fixture
def containers(image: str) -> Iterator[Containers]:
    made = Containers(image)
    yield made
    made.close()


def clone(folder: Path) -> Path:
    """Copy the part of the repository that containers use: the image's files, the compose files and the programs."""
    for name in CLONE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / name)
    return folder


def one_core(folder: Path) -> dict[str, str]:
    """Variables with which each container of a clone that trains has one core, and so one thread. Several containers
    share the cores of a small machine, and threads that wait for each other would take many times as long."""
    (folder / "one-core.yaml").write_text(ONE_CORE)
    return {"COMPOSE_FILE": "compose.yaml:one-core.yaml"}


def owner_of(folder: Path) -> int:
    """The user that owns a folder. Root first gives it to another user, so that containers do not write as root."""
    if os.geteuid() != 0:
        return os.getuid()
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, SOMEBODY, SOMEBODY)
    return SOMEBODY


class Project:
    """A clone and the services of its compose.yaml. The crew's port is on a loopback address of this process alone."""

    def __init__(self, folder: Path, *, image: str, command: list[str]) -> None:
        self.folder = clone(folder)
        self.name = f"{NAMES}-project"
        self._command = [*command, "-p", self.name]
        pid = os.getpid()
        address = f"127.{pid >> 16 & 255}.{pid >> 8 & 255}.{pid & 255}"
        self._variables = {**os.environ, **one_core(folder), "CUADRILLA_IMAGE": image, "LAN_ADDRESS": address}

    def compose(self, *arguments: str, **variables: str) -> str:
        """Run a command of compose, which must succeed, and return its output."""
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=self.folder, env=self._variables | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def containers(self, service: str) -> list[str]:
        """Ids of the containers of a service, also of those that have ended."""
        labels = (f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}")
        return docker("ps", "-aq", *(word for label in labels for word in ("--filter", f"label={label}"))).split()

    def inside(self, service: str, *command: str) -> str:
        """Run a command in the container of a service, and return its output."""
        (container,) = self.containers(service)
        return docker("exec", container, "as-owner", *command)

    def published(self, service: str) -> object:
        (container,) = self.containers(service)
        return json.loads(docker("inspect", "--format", "{{json .HostConfig.PortBindings}}", container))

    def close(self) -> None:
        profiles = ("crew", "ray", "dask", "tensorboard", "serve", "monitor")
        every = [word for profile in profiles for word in ("--profile", profile)]
        self.compose(*every, "down", "--volumes", "--remove-orphans", "--timeout", GRACE_SECONDS)


@pytest.fixture
def project(image: str, tmp_path: Path) -> Iterator[Project]:
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    if not plugin and shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose, or the plugin `docker compose`")
    made = Project(tmp_path / "project", image=image, command=["docker", "compose"] if plugin else ["docker-compose"])
    yield made
    made.close()
