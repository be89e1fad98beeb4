"""A preparation on the workers of a Dask cluster gives the bytes of one process, even if a worker is killed."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from cuadrilla.errors import INTERRUPTED_EXIT_CODE, EnvironmentProblem
from tests.commands import begin, ended
from tests.ports import free_port
from tests.spawn.test_prepare import contents
from tests.spawn.test_prepare_shared import processes_of_jobs

pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
pytestmark = pytest.mark.thorough

HELD_SECONDS = 5
TIMEOUT_SECONDS = 120


CLUSTER = """
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    count, folder = sys.argv[1:]
    options = dict(threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0", local_directory=folder)
    with LocalCluster(n_workers=int(count), worker_dashboard_address="127.0.0.1:0", **options) as started:
        print(started.scheduler_address, flush=True)
        sys.stdin.read()
"""


@contextmanager
def running(folder, *, count):
    """A cluster in its own process, whose killed workers are started again. Yields the process and the address."""
    (folder / "cluster.py").write_text(CLUSTER)
    child = subprocess.Popen(
        [sys.executable, str(folder / "cluster.py"), str(count), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with child:
        yield child, child.stdout.readline().strip()
        child.stdin.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), count=2) as started:
        yield started


def start(address, *, sources, out, wait=True):
    child = begin("data", "prepare", sources, "--out", out, "--vocab", 300, "--dask", address)
    if wait:
        assert "cleaning\n" in iter(child.stderr.readline, "")
    return child


def test_the_bytes_are_those_of_one_process(cluster, library, prepared, tmp_path):
    child = start(cluster[1], sources=library, out=tmp_path / "out")
    said = ended(child)
    assert contents(tmp_path / "out") == contents(prepared)
    assert "distributed" not in said  # Dask's own log


def test_a_killed_worker_s_jobs_are_done_again(cluster, library, prepared, tmp_path):
    child = start(cluster[1], sources=library, out=tmp_path / "out")
    victim = processes_of_jobs(cluster[0].pid)[0]
    victim.suspend()
    try:
        with pytest.raises(subprocess.TimeoutExpired):  # it has jobs, perhaps the first one
            child.wait(HELD_SECONDS)
    finally:
        victim.kill()
    ended(child)
    assert contents(tmp_path / "out") == contents(prepared)


def test_ctrl_c_ends_it(cluster, library, tmp_path):
    child = start(cluster[1], sources=library, out=tmp_path / "out")
    held = processes_of_jobs(cluster[0].pid)
    for process in held:
        process.suspend()
    try:
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        for process in held:
            process.resume()
    assert child.returncode == INTERRUPTED_EXIT_CODE, said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_no_scheduler_and_no_workers_are_named(library, tmp_path):
    with running(tmp_path, count=0) as (_, empty):
        for address, why in ((empty, "it has no workers"), (f"127.0.0.1:{free_port()}", "cannot be used")):
            child = start(address, sources=library, out=tmp_path / "out", wait=False)
            said = ended(child, code=5)
            assert why in said
            assert "Traceback" not in said
            assert not (tmp_path / "out").exists()


def test_a_worker_with_another_program_is_named(cluster, monkeypatch):
    from cuadrilla.data import dask

    monkeypatch.setattr(dask, "__version__", "9")
    with pytest.raises(EnvironmentProblem, match="this machine has cuadrilla 9"), dask.dask_workers(cluster[1]):
        raise AssertionError("it began")
