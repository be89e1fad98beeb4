"""Lines of older guides as they stand (docs/older-guides.toml): containers on one network, a recipe for five."""

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
from tests.commands import wait_for
from tests.docker.conftest import NAMES
from tests.images import MADE_FROM, ROOT, base_image, docker
from tests.inside import cuadrilla
from tools.guide_page import guides

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

LINES = [line for guide in guides() for row in guide["row"] for line in row["lines"]]
RECIPE = "recipes/gpt2_spanish"
LAN, CARD = "192.168.1.50", "lo"
PLUGIN = """#!/bin/sh
case $1 in
docker-cli-plugin-metadata) echo '{"SchemaVersion": "0.1.0", "Vendor": "tests", "Version": "1.29.2"}' ;;
*) shift; exec docker-compose "$@" ;;
esac
"""
MACHINES = 5


def line(*parts: str) -> str:
    """The only one that holds these parts."""
    (found,) = [each for each in LINES if all(part in each for part in parts)]
    return found


class Machine:
    """A clone of the repository, as a user of this machine has it in the recipe's folder, and a shell there."""

    def __init__(self, folder: Path, *, stack: ExitStack) -> None:
        self._stack, self.image = stack, f"{NAMES}-guide"
        for name in (*MADE_FROM, RECIPE):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, folder / name)
        self.workspace = folder / RECIPE
        settings = {"UID": os.getuid(), "GID": os.getgid(), "BASE_IMAGE": base_image(), "CUADRILLA_IMAGE": self.image}
        (self.workspace / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self._environ = {**os.environ, "COMPOSE_PROJECT_NAME": f"{NAMES}-guide"}
        if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
            self._environ["DOCKER_CONFIG"] = str(_plugin(folder))

    def start(self, command: str) -> "subprocess.Popen[str]":
        """In a session of its own, so that what belongs to it can be ended with it."""
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self.workspace, env=self._environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._stack.callback(_end, process)
        return process

    def typed(self, command: str) -> tuple[int, str]:
        """Its exit code, and what it says."""
        process = self.start(command)
        return process.returncode or process.wait(600), "".join(process.communicate())

    def containers(self, *words: str) -> list[str]:
        """Those that run and have all these words among their variables and arguments."""
        every = docker("ps", "-q", "--filter", f"label=com.docker.compose.project={NAMES}-guide").split()
        shown = {each: docker("inspect", "--format", "{{.Config.Env}} {{.Args}}", each) for each in every}
        return [each for each, text in shown.items() if all(re.search(rf"\b{word}\b", text) for word in words)]

    def close(self) -> None:
        for each in self.containers():
            docker("kill", each)
        self.typed("docker compose down --volumes --remove-orphans")
        subprocess.run(["docker", "rmi", "--no-prune", f"{self.image}:cpu"], capture_output=True, check=False)


def _plugin(folder: Path) -> Path:
    """`docker compose` where there is docker-compose only."""
    plugins = folder / "docker" / "cli-plugins"
    plugins.mkdir(parents=True)
    (plugins / "docker-compose").write_text(PLUGIN)
    (plugins / "docker-compose").chmod(0o755)
    return plugins.parent


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def machine(image: str, tmp_path: Path) -> Iterator[Machine]:
    """`image` has built all but the last steps of what the recipe builds."""
    if shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose")
    with ExitStack() as stack:
        made = Machine(tmp_path / "clone", stack=stack)
        stack.callback(made.close)
        code, said = made.typed(line("docker compose build"))
        assert code == 0, said
        yield made


@pytest.fixture
def at_lan_address() -> Iterator[None]:
    """The guide's machine 0 is this one."""
    if os.geteuid() != 0:
        pytest.skip("needs root: an address for the loopback")
    subprocess.run(["ip", "address", "add", f"{LAN}/32", "dev", CARD], check=True)
    yield
    subprocess.run(["ip", "address", "del", f"{LAN}/32", "dev", CARD], check=True)


def prepare(machine: Machine, stories: int) -> None:
    done = cuadrilla("data", "prepare", f"cuentos:{stories}", "--out", machine.workspace / "Data")
    assert done.returncode == 0, done.stderr


def test_the_commands_of_one_machine(machine: Machine) -> None:
    code, said = machine.typed(line("run --rm trainer nvidia-smi"))
    assert (code, "this container has no NVIDIA card" in said) == (1, True), said
    train = line("python train_gpt2_spanish.py --epochs 1")
    code, said = machine.typed(train)
    assert code == 4
    assert "cuadrilla data get quijote --to textos, then: cuadrilla data prepare textos --out Data" in said

    prepare(machine, 20)
    code, said = machine.typed(train)
    assert code == 0, said
    assert "the run is complete at step" in said
    run = RunDir(machine.workspace / "checkpoints")
    assert {path.stat().st_uid for path in run.path.rglob("*")} == {os.getuid()}
    assert list(run.tensorboard.iterdir())

    machine.start(line("python monitor.py --interval 5"))
    wait_for(lambda: any("CPU" in docker("logs", each) for each in machine.containers("monitor.py")), seconds=100)


def test_five_machines(machine: Machine, at_lan_address: None) -> None:
    """Then one is lost, and is back with the same line."""
    prepare(machine, 600)
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
    wait_for(lambda: run.metrics.exists() and len(last_rows(run.metrics)) > 0, nodes[0], seconds=600)
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


def test_the_network_of_containers(image: str) -> None:
    """The names are the guide's own, so nobody else may have them."""
    names = ("ray-head", "ray-worker", "scheduler")
    there = (
        docker("ps", "-a", "--format", "{{.Names}}").split() + docker("network", "ls", "--format", "{{.Name}}").split()
    )
    if taken := {*names, "ml-network"} & {*there}:
        pytest.skip(f"there are containers or networks with these names: {', '.join(sorted(taken))}")
    with ExitStack() as stack:
        typed(line("docker network create ml-network"))
        stack.callback(docker, "network", "rm", "ml-network")
        docker("tag", f"{image}:cpu", "ml-node")
        stack.callback(docker, "rmi", "--no-prune", "ml-node")
        for name in names:
            stack.callback(subprocess.run, ["docker", "rm", "--force", name], capture_output=True)
        head, worker = (without_a_terminal(line(f"--name ray-{name}")) for name in ("head", "worker"))
        typed(f"{head} --block")
        wait_for(lambda: "Ray runtime started" in docker("logs", "ray-head"), seconds=120)
        typed(f"{worker} --block")
        both = line("ray.cluster_resources()")
        wait_for(lambda: nodes_of(docker("exec", "ray-head", "python", "-c", both)) == 2, seconds=120)

        docker(
            "run", "--detach", "--rm", "--network", "ml-network", "--name", "scheduler", "ml-node", "dask", "scheduler"
        )
        client = f"{line('Client(')}; print(client.status)"
        asked = ("run", "--rm", "--network", "ml-network", "ml-node", "python", "-c", client)
        assert docker(*asked).splitlines()[-1] == "running"


def typed(command: str) -> None:
    subprocess.run(["bash", "-c", command], check=True, capture_output=True)


def without_a_terminal(command: str) -> str:
    """A test has none (-it), this machine no card; what it prints is read from the log."""
    return command.replace("docker run -it --rm --gpus all", "docker run --detach --rm --shm-size 1g")


def nodes_of(printed: str) -> int:
    return len(set(re.findall(r"'node:\d[^']*'", printed)))
