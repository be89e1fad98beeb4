"""A search over a function by the containers of `docker compose --profile dask`."""

import json
import shutil
from pathlib import Path

import pytest

from cuadrilla.rundir import read_jsonl
from tests.commands import wait_for
from tests.docker.conftest import Project
from tests.docker.test_compose import free_ports
from tests.images import ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


def test_the_forest_by_two_workers(project: Project) -> None:
    """Also of another image than this machine's Python: the program that types the command is in a container, too."""
    shutil.copytree(ROOT / "examples" / "trees" / "forest", project.folder / "forest")
    (port,) = free_ports(1)
    dask = ("--profile", "dask")
    project.compose(*dask, "up", "--detach", "--scale", "dask-worker=2", DASK_PORT=port)
    wait_for(lambda: project.compose(*dask, "logs", "dask-worker").count("Registered to") >= 2)
    options = ("--scheduler", "tcp://scheduler:8786", "--insecure-scheduler", "--set", "tune.trials=4")
    said = project.compose("run", "--rm", "trainer", "cuadrilla", "--json", "tune", "forest", *options)
    best = json.loads((project.folder / "forest" / "tune" / "best.json").read_text())
    assert best["score"] > 0.9  # 0.1 by chance
    assert best["trial"] in said
    ended = [row for row in read_jsonl(project.folder / "forest" / "tune" / "trials.jsonl") if row["event"] == "ended"]
    assert len(ended) == 5
    assert len({row["place"] for row in ended}) == 2
    assert (
        Path(project.folder / "forest" / "tune" / best["trial"] / "logs" / "talk.txt").read_text().count("trees") == 1
    )
