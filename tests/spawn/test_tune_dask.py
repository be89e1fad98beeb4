"""A search over a function by the workers of a Dask cluster: the same results, workers that die, and Ctrl-C."""

import os
import signal

import psutil
import pytest

from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from tests.commands import wait_for
from tests.inside import cuadrilla

pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
from tests.spawn.test_dask import processes_of_workers, scheduler, workers
from tests.spawn.test_tune_function import BOWL, WAITS, best, decided, is_gone, pid_in, rows, start, write

pytestmark = [pytest.mark.spawn, pytest.mark.thorough]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Scheduler and two workers: (the scheduler's address, the workers' watcher)."""
    folder = tmp_path_factory.mktemp("cluster")
    with scheduler(folder) as address, workers(address, folder, count=2) as nanny:
        yield address, nanny


def waiting(folder, tmp_path, **settings):
    """A search whose calls wait for a file `go`."""
    code = WAITS % str(tmp_path) + BOWL.replace("    print", "    wait_at(x)\n    print")
    return write(folder, code, **settings)


def test_the_results_are_those_of_this_machine(cluster, tmp_path):
    here, there = (write(tmp_path / name, BOWL, trials=4, rungs=2, factor=2) for name in ("here", "there"))
    assert cuadrilla("tune", here).returncode == 0
    search = start(there, "--scheduler", cluster[0])
    _, said = search.communicate(timeout=150)
    assert search.returncode == 0, said
    assert "distributed" not in said  # Dask's own log
    assert decided(there) == decided(here)
    assert best(there) == best(here)
    assert {row["place"].partition("://")[0] for row in rows(there)} == {"tcp"}
    assert "looking at" in (there / "tune" / "t0000-r0" / "logs" / "talk.txt").read_text()


def test_a_worker_that_dies_gives_its_trial_back(cluster, tmp_path):
    """Dask's nanny starts another one."""
    address, nanny = cluster
    folder = waiting(tmp_path / "killed", tmp_path, trials=3)
    search = start(folder, "--scheduler", address)
    call = pid_in(tmp_path / "pid")
    psutil.Process(psutil.Process(call).ppid()).kill()
    wait_for(lambda: is_gone(call))
    (tmp_path / "go").touch()
    _, said = search.communicate(timeout=150)
    assert search.returncode == 0, said
    assert [row["reason"] for row in rows(folder)] == [""] * 3
    wait_for(lambda: len(processes_of_workers(nanny)) == 2)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_calls_end_with_the_search(cluster, tmp_path, how):
    folder = waiting(tmp_path / "stopped", tmp_path, trials=2)
    search = start(folder, "--scheduler", cluster[0])
    call = pid_in(tmp_path / "pid")
    os.kill(search.pid, how)
    _, said = search.communicate(timeout=150)
    assert search.returncode == (INTERRUPTED_EXIT_CODE if how == signal.SIGINT else -how), said
    assert "Traceback" not in said
    wait_for(lambda: is_gone(call))
    (tmp_path / "go").touch()
    assert cuadrilla("tune", folder).returncode == 0
    assert len(rows(folder)) == 2


def test_a_cluster_without_workers_and_none_at_all(tmp_path):
    folder = write(tmp_path / "bowl", BOWL)
    with scheduler(tmp_path) as address:
        done = cuadrilla("tune", folder, "--scheduler", address)
        assert (done.returncode, "has no workers" in done.stderr) == (5, True), done.stderr
    done = cuadrilla("tune", folder, "--scheduler", "tcp://192.168.1.50:8786")
    assert done.returncode == 2
    assert "is not encrypted" in done.stderr


def test_a_worker_with_other_versions_is_named(tmp_path):
    """Its NumPy says that it is another one."""
    (tmp_path / "numpy-0.1.dist-info").mkdir()
    (tmp_path / "numpy-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
    (tmp_path / "numpy-0.1.dist-info" / "top_level.txt").write_text("numpy\n")
    folder = write(tmp_path / "bowl", "import numpy\n" + BOWL)
    with scheduler(tmp_path) as address, workers(address, tmp_path / "w", env={"PYTHONPATH": str(tmp_path)}):
        done = cuadrilla("tune", folder, "--scheduler", address)
    assert done.returncode == 3
    assert "has other versions" in done.stderr
    assert "numpy: 0.1 there" in done.stderr
