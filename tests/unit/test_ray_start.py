"""When Ray is started, and how, before anything of Ray is imported."""

import json
import os
from pathlib import Path

import pytest

from cuadrilla.config import CrewEngine, LocalEngine
from cuadrilla.engines.ray import cluster
from cuadrilla.engines.ray.resources import machine_of
from cuadrilla.engines.supervise import RESTARTED, was_restarted
from cuadrilla.errors import EnvironmentProblem, LinkError
from cuadrilla.rundir import FolderLock, RunDir, append_event, write_json
from tests.inside import cuadrilla


def test_a_coordinator_is_started_again_until_something_has_happened(tmp_path: Path) -> None:
    run, seen = RunDir(tmp_path), [was_restarted(RunDir(tmp_path))]
    for kind in ("joined", RESTARTED, "joined"):
        append_event(run.events, kind)
        seen.append(was_restarted(run))
    assert seen == [False, False, True, False]


@pytest.mark.parametrize("engine", [LocalEngine(kind="local"), CrewEngine(kind="crew")])
def test_an_engine_without_ray_has_no_cluster(tmp_path: Path, engine: LocalEngine | CrewEngine) -> None:
    with cluster.cluster_of(engine, RunDir(tmp_path), practice=True) as begun:
        assert begun is None


def test_why_ray_does_not_start_is_said_where_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    engine = CrewEngine(kind="ray", ray_address="127.0.0.1:1")
    with cluster.cluster_of(engine, RunDir(tmp_path), practice=False) as begun:
        assert begun is not None
        for _ in range(2):
            with pytest.raises(EnvironmentProblem, match=r"no token|not installed"):
                begun.wait()


def test_a_token_among_the_user_s_variables_is_not_the_one_of_a_cluster_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would take it instead of the fresh one, and a cluster that is begun after a kick would have the old token."""
    ours = {cluster.TOKEN_FILE: str(tmp_path / "ours")}
    assert cluster.TOKEN not in cluster.settled({cluster.TOKEN: "f" * 64}, ours)
    assert cluster.settled({cluster.TOKEN: "f" * 64}, {})[cluster.TOKEN] == "f" * 64  # for a running cluster of others
    (tmp_path / "ours").write_text("a" * 64)
    monkeypatch.setenv(cluster.TOKEN, "f" * 64)
    with cluster._variables(ours):
        assert cluster.read_token() == "a" * 64
    assert cluster.read_token() == "f" * 64


@pytest.mark.parametrize(("address", "said"), [("auto", "not a Ray job"), ("ray://head:10001", "not an address")])
def test_an_address_that_leads_to_no_head(monkeypatch: pytest.MonkeyPatch, address: str, said: str) -> None:
    monkeypatch.setenv(cluster.TOKEN, "f" * 64)
    monkeypatch.delenv(cluster.RAY_ADDRESS, raising=False)
    with pytest.raises(LinkError, match=said), cluster.joined(address):
        pass


def test_a_machine_is_what_ray_says_of_it() -> None:
    node = {"NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 8.0, "GPU": 2.0, "cuadrilla": 2.0}, "Labels": {}}
    machine = machine_of(node)
    assert (machine.node, machine.address, machine.workers) == ("ray-10-0-0-7", "10.0.0.7", 2)
    assert machine_of({**node, "Resources": {}, "Labels": {cluster.NAME_LABEL: "ana"}}).node == "ana"


def test_nodes_shows_the_cluster_of_a_run_that_trains(tmp_path: Path) -> None:
    """What a coordinator that was killed has left is not shown, also while another one trains without Ray."""
    run = RunDir(tmp_path)
    machine = {"node": "ana", "address": "10.0.0.7", "workers": 2, "resources": {"CPU": 8.0, "memory": 2.0**33}}
    found = {"address": "10.0.0.7:6379", "resources": {"CPU": 8.0}, "available": {"CPU": 6.0}, "nodes": [machine]}
    write_json(run.ray, {"pid": os.getpid(), **found})
    assert cuadrilla("nodes", str(tmp_path)).returncode == 2
    with FolderLock(run.lock, purpose="test"):
        assert json.loads(cuadrilla("--json", "nodes", str(tmp_path)).stdout) == found
        shown = cuadrilla("nodes", str(tmp_path))
        assert shown.stdout.split()[-6:] == ["10.0.0.7", "2", "8", "0", "8.0", "GiB"]
        assert "free: 6 CPU" in shown.stderr
        write_json(run.ray, {"pid": os.getpid() + 1, **found})
        assert cuadrilla("nodes", str(tmp_path)).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (("run", "--ray-address", "127.0.0.1:6379"), 2),
        (("--ray-without-token",), 2),
        (("no/such/run",), 2),
        (("--ray-address", "nowhere"), 5),
        (("--ray-address", "[es]:6379"), 5),
    ],
)
def test_nodes_refuses_what_names_no_cluster(arguments: tuple[str, ...], exit_code: int) -> None:
    done = cuadrilla("nodes", *arguments)
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert "hint: " in done.stderr
