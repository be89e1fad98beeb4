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
    with cluster.cluster_of(engine, RunDir(tmp_path), practice=True) as starting:
        assert starting() is None


def test_why_ray_does_not_start_is_said_where_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    engine = CrewEngine(kind="ray", ray_address="127.0.0.1:1")
    with cluster.cluster_of(engine, RunDir(tmp_path), practice=False) as starting:
        for _ in range(2):
            with pytest.raises(EnvironmentProblem, match=r"no token|not installed"):
                starting()
