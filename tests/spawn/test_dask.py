"""`examples/prepare_dask.py` gives the bytes of one process, even if a worker is killed."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import ended, wait_for
from tests.spawn.test_prepare import contents
from tests.spawn.test_prepare_shared import processes_of_jobs

pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
pytestmark = pytest.mark.thorough

EXAMPLE = Path(__file__).parents[2] / "examples" / "prepare_dask.py"
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


def start(address, *, sources, out, recipe=None):
    """Start the example as a user does. `recipe`: the version of the preparation, if it is another one."""
    words = [str(EXAMPLE), str(sources), "--out", str(out), "--vocab", "300", "--scheduler", address]
    if recipe:
        patch = f"import runpy, sys; from cuadrilla.data import corpus; corpus.RECIPE = {recipe}; sys.argv = {words}"
        words = ["-c", f"{patch}; runpy.run_path(sys.argv[0], run_name='__main__')"]
    return subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)


def begun(address, *, sources, out):
    child = start(address, sources=sources, out=out)
    wait_for((out / ".work").exists, child)
    return child


def test_the_bytes_are_those_of_one_process(cluster, library, prepared, tmp_path):
    ended(start(cluster[1], sources=library, out=tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(prepared)


def test_a_killed_worker_s_jobs_are_done_again(cluster, library, prepared, tmp_path):
    child = begun(cluster[1], sources=library, out=tmp_path / "out")
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
    child = begun(cluster[1], sources=library, out=tmp_path / "out")
    held = processes_of_jobs(cluster[0].pid)
    for process in held:
        process.suspend()
    try:
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        for process in held:
            process.resume()
    assert child.returncode == -signal.SIGINT, said
    assert not (tmp_path / "out").exists()


def test_no_workers_and_another_program_are_named(cluster, library, tmp_path):
    with running(tmp_path, count=0) as (_, empty):
        assert "the workers have []" in ended(start(empty, sources=library, out=tmp_path / "out"), code=1)
    said = ended(start(cluster[1], sources=library, out=tmp_path / "out", recipe=99), code=1)
    assert re.search(r"this machine has 'cuadrilla [\w.]+\.99, tokenizers", said)
    assert not (tmp_path / "out").exists()
