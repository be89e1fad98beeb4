"""The roles of compose.yaml in real containers: a crew that loses one container, and the roles for other programs."""

import shutil
from pathlib import Path

import pytest
import yaml

from cuadrilla.rundir import RunDir, last_rows
from tests.commands import ENDLESS, goes_on, joined, reached, wait_for
from tests.docker.conftest import Project, owner_of
from tests.images import docker
from tests.machines import LANGUAGE_RUN, present
from tests.ports import free_port
from tests.runs import final_sha256

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

CREW_RUN = '[engine]\nkind = "crew"\nworkers = []\n'
CREW = ("--profile", "crew")
COME = "from distributed import Client; Client('127.0.0.1:8786').wait_for_workers(1, timeout=100)"
CAPABILITIES = "grep -hE '^(Uid|CapPrm|CapEff|CapBnd|NoNewPrivs):' /proc/1/status /proc/self/status"


def make_run(folder: Path, stories: Path, *, more: str = "") -> RunDir:
    """A run with a copy of its data, since a link would lead nowhere in a container."""
    folder.mkdir()
    shutil.copytree(stories, folder / "data")
    (folder / "run.toml").write_text(LANGUAGE_RUN.format(steps=ENDLESS) + more)
    return RunDir(folder)


def exit_code(container: str) -> int:
    return int(docker("inspect", "--format", "{{.State.ExitCode}}", container))


def test_compose_reads_the_files(project: Project) -> None:
    merged = yaml.safe_load(project.compose("config", COMPOSE_FILE="compose.yaml:compose.gpu.yaml"))
    trainer = merged["services"]["trainer"]
    assert trainer["build"]["args"]["TORCH_BUILD"] == "cu130"
    assert trainer["image"].rpartition(":")[2] == "cuda"


def test_a_crew_that_loses_a_container_ends_with_the_bits_of_one_machine(project: Project, stories: Path) -> None:
    """Before, a training without a crew is stopped, and saves as the user who owns the folder."""
    run = make_run(project.folder / "run", stories, more=CREW_RUN)
    alone = make_run(project.folder / "alone", stories)
    user = owner_of(project.folder)
    name = f"{project.name}-alone"
    project.compose("run", "--detach", "--name", name, "-w", "/workspace", "trainer", "cuadrilla", "train", "alone")
    wait_for(reached(alone, 2))
    docker("stop", name)
    assert exit_code(name) == 130
    docker("rm", name)
    steps = last_rows(alone.metrics)[-1]["version"]
    assert (alone.checkpoints / f"v{steps:08d}").is_dir()

    project.compose(*CREW, "up", "--detach", "--scale", "worker=3")
    wait_for(lambda: len(present(run)) == 3)
    victim = project.containers("worker")[0]
    docker("kill", victim)
    wait_for(lambda: len(present(run)) == 2)
    wait_for(goes_on(run))
    docker("start", victim)
    wait_for(lambda: len(present(run)) == 3)
    wait_for(reached(run, steps + 1))
    (coordinator,) = project.containers("coordinator")
    project.compose(*CREW, "stop")
    assert exit_code(coordinator) == 130
    assert "cuadrilla1." not in project.compose(*CREW, "logs") + docker("inspect", coordinator, victim)
    assert {path.stat().st_uid for path in [*run.path.rglob("*")]} == {user}

    versions = [row["version"] for row in last_rows(run.metrics)]
    assert versions == list(range(1, versions[-1] + 1))
    project.compose("run", "--rm", "ingest", "cuadrilla", "train", "alone", "--stop-at", str(versions[-1]))
    assert final_sha256(run.path) == final_sha256(alone.path)


def test_a_crew_without_a_run_makes_one(project: Project) -> None:
    owner_of(project.folder)
    project.compose(*CREW, "up", "--detach")
    wait_for(reached(RunDir(project.folder / "run"), 2), seconds=300)
    wait_for(lambda: len(present(RunDir(project.folder / "run"))) == 2)


def test_ray_trains_a_run_on_both_of_its_containers(project: Project, stories: Path) -> None:
    run = make_run(project.folder / "run", stories)
    owner_of(project.folder)
    port = str(free_port())
    project.compose("--profile", "ray", "up", "--detach", RAY_PORT=port)
    assert project.published("ray-head") == {"8265/tcp": [{"HostIp": "127.0.0.1", "HostPort": port}]}
    assert len(project.inside("ray-head", "cat", "/ray/token")) == 64
    (head,) = project.containers("ray-head")
    line = "cuadrilla up run --set 'engine.workers=[]' --uses 2 | python examples/ray_crew.py"
    docker("exec", "--detach", head, "as-owner", "sh", "-c", line)
    wait_for(joined(run, 2), seconds=300)
    wait_for(goes_on(run))


def test_dask_and_tensorboard(project: Project) -> None:
    """They use free ports of the loopback, since the usual ones may be in use. A role runs as the folder's owner and
    without capabilities. It drops those that it starts with, and commands that are run in it have none either."""
    user = owner_of(project.folder)
    free = {"DASK_PORT": str(free_port()), "TENSORBOARD_PORT": str(free_port())}
    project.compose("--profile", "dask", "--profile", "tensorboard", "up", "--detach", **free)
    for service, name, port in (("scheduler", "DASK_PORT", 8787), ("tensorboard", "TENSORBOARD_PORT", 6006)):
        assert project.published(service) == {f"{port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": free[name]}]}
    found = [line.split()[1] for line in project.inside("tensorboard", "sh", "-c", CAPABILITIES).splitlines()]
    assert found == [str(user), *["0" * 16] * 3, "1"] * 2
    project.inside("scheduler", "python", "-c", COME)
    by_dask = ("examples/prepare_dask.py", "cuentos:200", "--out", "by-dask", "--scheduler", "scheduler:8786")
    project.compose("run", "--rm", "ingest", "python", *by_dask)
    project.compose("run", "--rm", "ingest", "cuadrilla", "data", "prepare", "cuentos:200", "--out", "here")
    there, here = (
        [path.read_bytes() for path in sorted((project.folder / name).glob("*.bin"))] for name in ("by-dask", "here")
    )
    assert len(here) == 2
    assert there == here
