"""Commands of older guides, unchanged (docs/older-guides.toml): containers on one network, a recipe for five PCs."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests.commands import reached, wait_for
from tests.docker.conftest import NAMES, clone, one_core, owner_of
from tests.images import base_image, docker, has_image
from tools.guide_page import guides

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

LINES = [line for guide in guides() for row in guide["row"] for line in row["lines"]]
BASE = "python:3.12-slim-bookworm"
LAN, CARD = "192.168.1.50", "lo"
PLUGIN = """#!/bin/sh
case $1 in
docker-cli-plugin-metadata) echo '{"SchemaVersion": "0.1.0", "Vendor": "tests", "Version": "1.29.2"}' ;;
*) shift; exec docker-compose "$@" ;;
esac
"""
MACHINES = 5
SPAWN = """
import torch.multiprocessing as mp

def train(rank):
    print(f"Proceso {rank} entrenando")

if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""


def line(*parts: str) -> str:
    """The only line of the guides that contains these parts."""
    (found,) = [each for each in LINES if all(part in each for part in parts)]
    return found


class Machine:
    """A shell in a clone of the repository. The clone belongs to a user and has no `.env`."""

    def __init__(self, folder: Path) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self._image = f"{NAMES}-guide"
        self.folder = clone(folder / "clone")
        limited = one_core(self.folder)
        self.user = owner_of(self.folder)
        self.workspace = self.folder / "recipes" / "gpt2_spanish"
        settings = {"COMPOSE_PROJECT_NAME": f"{NAMES}-guide", "CUADRILLA_IMAGE": self._image}
        self._environ = {**os.environ, **limited, **settings, "BASE_IMAGE": base_image()}
        if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
            self._environ["DOCKER_CONFIG"] = str(_plugin(folder))

    def start(self, command: str) -> "subprocess.Popen[str]":
        """Start a command in its own session, so that its child processes can be ended with it."""
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, env=self._environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def typed(self, command: str) -> tuple[int, str]:
        """Run a command, and return its exit code and output."""
        process = self.start(command)
        said = "".join(process.communicate(timeout=900))
        return process.returncode, said

    def containers(self, *words: str) -> list[str]:
        """The running containers that have all these words among their variables and arguments."""
        every = docker("ps", "-q", "--filter", f"label=com.docker.compose.project={NAMES}-guide").split()
        shown = {each: docker("inspect", "--format", "{{.Config.Env}} {{.Args}}", each) for each in every}
        return [each for each, text in shown.items() if all(re.search(rf"\b{word}\b", text) for word in words)]

    def clear(self) -> None:
        """End what was started, and remove what was written."""
        for each in self.containers():
            docker("kill", each)
        while self._started:
            _end(self._started.pop())
        for name in ("Data", "checkpoints"):
            shutil.rmtree(self.workspace / name, ignore_errors=True)

    def close(self) -> None:
        self.typed("docker compose down --volumes --remove-orphans")
        subprocess.run(["docker", "rmi", "--no-prune", f"{self._image}:cpu"], capture_output=True, check=False)


def _plugin(folder: Path) -> Path:
    """A plugin that gives `docker compose` on a machine that has only docker-compose."""
    plugins = folder / "docker" / "cli-plugins"
    plugins.mkdir(parents=True)
    (plugins / "docker-compose").write_text(PLUGIN)
    (plugins / "docker-compose").chmod(0o755)
    return plugins.parent


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def built(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with the guide's image. Most steps of its build were already made for `image`."""
    if shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose")
    made = Machine(tmp_path_factory.mktemp("guide"))
    code, said = made.typed(line("docker compose build"))
    assert code == 0, said
    yield made
    made.close()


@pytest.fixture
def machine(built: Machine) -> Iterator[Machine]:
    yield built
    built.clear()


@pytest.fixture
def at_lan_address() -> Iterator[None]:
    """This machine has the address of the guide's machine 0."""
    if os.geteuid() != 0:
        pytest.skip("needs root: an address for the loopback")
    subprocess.run(["ip", "address", "add", f"{LAN}/32", "dev", CARD], check=True)
    yield
    subprocess.run(["ip", "address", "del", f"{LAN}/32", "dev", CARD], check=True)


def test_the_commands_of_one_machine(machine: Machine) -> None:
    """./Data is empty, so the built-in stories are used. The training is stopped as `docker compose stop` does it."""
    code, said = machine.typed(line("run --rm trainer nvidia-smi"))
    assert (code, "this container has no NVIDIA card" in said) == (1, True), said
    run = RunDir(machine.workspace / "checkpoints")
    training = machine.start(line("python train_gpt2_spanish.py --epochs 1"))
    wait_for(reached(run, 3), training, seconds=300)
    docker("stop", "-t", "100", *machine.containers("train_gpt2_spanish.py"))
    said = "".join(training.communicate(timeout=100))
    assert training.returncode == 0, said
    assert "Data is empty: the built-in stories, cuentos:500" in said
    assert "preset     micro" in said
    steps = last_rows(run.metrics)[-1]["version"]
    assert (run.checkpoints / f"v{steps:08d}").is_dir()
    written = [*run.path.rglob("*"), *(machine.workspace / "Data").rglob("*")]
    assert {path.stat().st_uid for path in written} == {machine.user}
    assert list(run.tensorboard.iterdir())

    machine.start(line("python monitor.py --interval 5"))
    wait_for(lambda: any("CPU" in docker("logs", each) for each in machine.containers("monitor.py")), seconds=100)


def test_five_machines(machine: Machine, at_lan_address: None) -> None:
    """One of them is lost, and comes back with the same command."""
    code, said = machine.typed("docker compose run --rm trainer cuadrilla data prepare cuentos:400 --out Data")
    assert code == 0, said
    probe = line("python test_ddp.py --backend auto", "RANK=0")
    ranks = [machine.start(probe.replace(" RANK=0", f" RANK={rank}")) for rank in range(MACHINES)]
    for number, rank in enumerate(ranks):
        said = "".join(rank.communicate(timeout=300))
        assert rank.returncode == 0, said
        assert f"rank {number} of 5: backend gloo" in said
        assert f"rank {number}: all_reduce gives 15, right is 15" in said

    launch = line("./ddp_launch.sh", "NODE_RANK=0")
    nodes = [machine.start(launch.replace("NODE_RANK=0", f"NODE_RANK={number}")) for number in range(MACHINES)]
    run = RunDir(machine.workspace / "checkpoints")
    wait_for(reached(run, 1), nodes[0], seconds=600)
    (victim,) = machine.containers("NODE_RANK=3", "ddp_launch.sh")
    docker("kill", victim)
    nodes[3].wait(100)
    nodes[3] = machine.start(launch.replace("NODE_RANK=0", "NODE_RANK=3"))
    said = ["".join(node.communicate(timeout=900)) for node in nodes]
    assert [node.returncode for node in nodes] == [0] * MACHINES, said
    assert "all machines meet again (1 of 3)" in said[0]
    assert "resumed    at step" in said[0]
    assert "the run is complete at step" in said[0]
    versions = [row["version"] for row in last_rows(run.metrics)]
    assert versions == list(range(1, versions[-1] + 1))


@pytest.fixture
def free_names() -> Iterator[ExitStack]:
    """The names of the guide are fixed, so no other containers or networks may have them."""
    names = ("ray-head", "ray-worker", "scheduler")
    there = docker("ps", "-a", "--format", "{{.Names}}").split()
    there += docker("network", "ls", "--format", "{{.Name}}").split()
    if taken := {*names, "ml-network"} & {*there}:
        pytest.skip(f"there are containers or networks with these names: {', '.join(sorted(taken))}")
    with ExitStack() as stack:
        docker(*line("docker network create ml-network").split()[1:])
        stack.callback(docker, "network", "rm", "ml-network")
        for name in names:
            stack.callback(subprocess.run, ["docker", "rm", "--force", name], capture_output=True)
        yield stack


def build_node(folder: Path, stack: ExitStack) -> None:
    """Build on the base image that the Dockerfile names, or on this machine's base image under that name."""
    if not has_image(BASE):
        docker("tag", base_image(), BASE)
        stack.callback(docker, "rmi", "--no-prune", BASE)
    stack.callback(subprocess.run, ["docker", "rmi", "--no-prune", "ml-node"], capture_output=True)
    subprocess.run(line("docker build").split(), cwd=clone(folder), check=True, capture_output=True)


def test_the_network_of_containers(image: str, free_names: ExitStack, tmp_path: Path) -> None:
    build_node(tmp_path, free_names)
    head, worker = (without_a_terminal(line(f"--name ray-{name}")) for name in ("head", "worker"))
    typed(head)
    assert docker("wait", "ray-head") == "0"  # without --block
    docker("rm", "ray-head")
    typed(f"{head} --block")
    wait_for(lambda: "Ray runtime started" in docker("logs", "ray-head"), seconds=120)
    typed(f"{worker} --block")
    both = ("exec", "ray-head", "as-owner", "python", "-c", line("ray.cluster_resources()"))
    wait_for(lambda: nodes_of(docker(*both)) == 2, seconds=120)

    run = ("run", "--rm", "--network", "ml-network")
    docker(*run, "--detach", "--name", "scheduler", "ml-node", "dask", "scheduler")
    client = f"{line('Client(')}; print(client.status)"
    assert docker(*run, "ml-node", "python", "-c", client).splitlines()[-1] == "running"
    (tmp_path / "spawn.py").write_text(SPAWN)
    two = docker(*run, "--volume", f"{tmp_path}:/workspace:ro", "ml-node", "python", "spawn.py")
    assert sorted(two.splitlines()) == ["Proceso 0 entrenando", "Proceso 1 entrenando"]


def typed(command: str) -> None:
    subprocess.run(["bash", "-c", command], check=True, capture_output=True)


def without_a_terminal(command: str) -> str:
    """Remove `-it` and `--gpus`, since a test has no terminal and this machine no GPU. The log has the output."""
    return command.replace("docker run -it --rm --gpus all", "docker run --detach --shm-size 1g")


def nodes_of(printed: str) -> int:
    return len(set(re.findall(r"'node:\d[^']*'", printed)))
