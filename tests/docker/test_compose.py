"""The files of `cuadrilla compose` with real containers: a crew that loses one, and the helpers for other programs."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from cuadrilla.rundir import RunDir, last_rows
from tests.commands import ENDLESS, goes_on, reached, wait_for
from tests.docker.conftest import Project
from tests.docker.test_image import BOTH_NODES, THROUGH_DASK
from tests.images import docker
from tests.machines import LANGUAGE_RUN, present
from tests.ports import free_port
from tests.runs import final_sha256

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

SOMEBODY = 4321
CREW = '[engine]\nkind = "crew"\nworkers = []\n'


def make_run(folder: Path, stories: Path, *, more: str = "") -> RunDir:
    """With its data in it: a link would lead nowhere in a container."""
    folder.mkdir()
    shutil.copytree(stories, folder / "data")
    (folder / "run.toml").write_text(LANGUAGE_RUN.format(steps=ENDLESS) + more)
    return RunDir(folder)


def owned_by_somebody(project: Project) -> int:
    """The folder is that user's, and so is what the containers do. Root only can give it away."""
    if os.geteuid() != 0:
        return os.getuid()
    for path in [project.folder, *project.folder.rglob("*")]:
        os.chown(path, SOMEBODY, SOMEBODY)
    env = project.folder / ".env"
    env.write_text(env.read_text().replace("UID=0", f"UID={SOMEBODY}").replace("GID=0", f"GID={SOMEBODY}"))
    return SOMEBODY


def exit_code(container: str) -> int:
    return int(docker("inspect", "--format", "{{.State.ExitCode}}", container))


def test_compose_reads_the_files(project: Project) -> None:
    merged = yaml.safe_load(
        project.compose("--profile", "trainer", "config", COMPOSE_FILE="compose.yaml:compose.gpu.yaml")
    )
    trainer = merged["services"]["trainer"]
    assert (trainer["build"]["target"], trainer["image"].rpartition(":")[2]) == ("cuda", "cuda")


def test_a_crew_that_loses_a_container_ends_with_the_bits_of_one_machine(project: Project, stories: Path) -> None:
    """And a training alone that is stopped saves, as the user whose folder it is."""
    run = make_run(project.folder / "run", stories, more=CREW)
    alone = make_run(project.folder / "alone", stories)
    user = owned_by_somebody(project)
    project.compose("--profile", "trainer", "up", "--detach", CUADRILLA_RUN="alone")
    wait_for(reached(alone, 2))
    project.compose("--profile", "trainer", "stop")
    assert [exit_code(container) for container in project.containers("trainer")] == [130]
    steps = last_rows(alone.metrics)[-1]["version"]
    assert (alone.checkpoints / f"v{steps:08d}").is_dir()

    roles = ("--profile", "coordinator", "--profile", "worker")
    project.compose(*roles, "up", "--detach", "--scale", "worker=3")
    wait_for(lambda: len(present(run)) == 3)
    victim = project.containers("worker")[0]
    docker("kill", victim)
    wait_for(lambda: len(present(run)) == 2)
    wait_for(goes_on(run))
    docker("start", victim)
    wait_for(lambda: len(present(run)) == 3)
    wait_for(reached(run, steps + 1))
    (coordinator,) = project.containers("coordinator")
    project.compose(*roles, "stop")
    assert exit_code(coordinator) == 130
    assert "cuadrilla1." not in project.compose(*roles, "logs") + docker("inspect", coordinator, victim)
    assert {path.stat().st_uid for path in [*run.path.rglob("*")]} == {user}

    versions = [row["version"] for row in last_rows(run.metrics)]
    assert versions == list(range(1, versions[-1] + 1))
    project.compose("run", "--rm", "trainer", "cuadrilla", "train", "alone", "--stop-at", str(versions[-1]))
    assert final_sha256(run.path) == final_sha256(alone.path)


def test_ray_dask_and_tensorboard(project: Project) -> None:
    """On ports of the loopback that are free: others may use the usual ones."""
    profiles = ("--profile", "ray", "--profile", "dask", "--profile", "tensorboard")
    pages = {
        "ray-head": ("RAY_PORT", 8265),
        "scheduler": ("DASK_PORT", 8787),
        "tensorboard": ("TENSORBOARD_PORT", 6006),
    }
    free = {page: str(free_port()) for page in pages}
    project.compose(*profiles, "up", "--detach", **{pages[name][0]: free[name] for name in pages})
    for service, (_, port) in pages.items():
        (container,) = project.containers(service)
        ports = json.loads(docker("inspect", "--format", "{{json .HostConfig.PortBindings}}", container))
        assert ports == {f"{port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": free[service]}]}
    assert project.compose("run", "--rm", "trainer", "python", "-c", THROUGH_DASK).split()[-1] == "42"
    (head,) = project.containers("ray-head")
    wait_for(lambda: docker("inspect", "--format", "{{.State.Health.Status}}", head) == "healthy")
    assert docker("exec", head, "timeout", "150", "python", "-c", BOTH_NODES).splitlines()[-1] == "both"
