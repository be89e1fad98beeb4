"""When Ray is started, and how, before anything of Ray is imported."""

from pathlib import Path

import pytest

from cuadrilla.config import CrewEngine, LocalEngine
from cuadrilla.engines.ray import cluster
from cuadrilla.engines.supervise import RESTARTED, was_restarted
from cuadrilla.errors import EnvironmentProblem
from cuadrilla.rundir import RunDir, append_event


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
