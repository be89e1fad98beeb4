"""A preparation on the workers of a Dask cluster: the same bytes as by one process; what is refused; what may die."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import trustme

from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from tests.commands import COMMAND
from tests.spawn.test_prepare import contents, write_books

pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
pytestmark = [pytest.mark.spawn, pytest.mark.thorough]

HELD_SECONDS = 5
TIMEOUT_SECONDS = 120
NO_PAGE = ("--no-dashboard", "--dashboard-address", "127.0.0.1:0")
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return write_books(tmp_path_factory.mktemp("text") / "libros", num_books=30, characters=80_000, seed=1)


@pytest.fixture(scope="module")
def prepared(library, tmp_path_factory):
    """The library, prepared by one process."""
    out = tmp_path_factory.mktemp("one") / "out"
    prepare([str(library)], out=out, options=PrepareOptions(vocab=300, processes=1))
    return out


def certificates(folder):
    """The options of Dask and of ours, for files of an authority that was made now."""
    folder.mkdir()
    authority = trustme.CA()
    issued = authority.issue_cert("node")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "node.pem")
    issued.private_key_pem.write_to_path(folder / "node.key")
    return ("--tls-ca-file", folder / "ca.pem", "--tls-cert", folder / "node.pem", "--tls-key", folder / "node.key")


@contextmanager
def running(*command, log, env=None):
    """A process with its children, which all end with the block."""
    with open(log, "wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "dask", *map(str, command)],
            stdout=file,
            stderr=file,
            cwd=log.parent,
            env={**os.environ, **(env or {})},
        )
    try:
        yield child
    finally:
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        for process in family:
            if process.is_running():
                process.kill()
        child.wait()
        psutil.wait_procs(family, timeout=TIMEOUT_SECONDS)


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@contextmanager
def scheduler(folder, *options):
    """Its address, as a client dials it."""
    file = folder / "scheduler.json"
    command = ("scheduler", "--host", "127.0.0.1", "--port", 0, *NO_PAGE, "--scheduler-file", file, *options)
    with running(*command, log=folder / "scheduler.log"):
        yield wait_for(lambda: file.exists() and json.loads(file.read_text() or "{}").get("address"))


@contextmanager
def workers(address, folder, *options, count=1, env=None):
    """The process that watches over workers: Dask's nanny starts one again that was killed."""
    folder.mkdir(exist_ok=True)
    command = ("worker", address, "--host", "127.0.0.1", "--nworkers", count, "--nthreads", 1, *NO_PAGE)
    log = folder / "worker.log"
    with running(*command, "--local-directory", folder, *options, log=log, env=env) as nanny:
        wait_for(lambda: log.read_text().count("Registered to") >= count)
        yield nanny


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Scheduler and two workers with TLS: (options of a client, the workers' watcher)."""
    folder = tmp_path_factory.mktemp("cluster")
    tls = certificates(folder / "tls")
    with scheduler(folder, "--protocol", "tls", *tls) as address, workers(address, folder, *tls, count=2) as nanny:
        yield ("--engine", "dask", "--scheduler", address, *tls), nanny


def start(*options, sources, out, wait=True):
    child = subprocess.Popen(
        [*COMMAND, *map(str, ("data", "prepare", sources, "--out", out, "--vocab", 300, *options))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    if wait:
        assert "cleaning\n" in iter(child.stderr.readline, "")
    return child


def refused(*options, sources, out, code):
    child = start(*options, sources=sources, out=out, wait=False)
    _, said = child.communicate(timeout=TIMEOUT_SECONDS)
    assert child.returncode == code, said
    assert "Traceback" not in said
    assert "hint:" in said
    assert not out.exists()
    return said


def processes_of_workers(nanny):
    """Each runs jobs; the nanny's other child only tracks what they share."""
    children = psutil.Process(nanny.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_the_bytes_are_those_of_one_process(cluster, library, prepared, tmp_path):
    child = start(*cluster[0], sources=library, out=tmp_path / "out")
    _, said = child.communicate(timeout=TIMEOUT_SECONDS)
    assert child.returncode == 0, said
    assert contents(tmp_path / "out") == contents(prepared)
    assert "distributed" not in said  # Dask's own log


def test_a_killed_worker_s_jobs_are_done_again(cluster, library, prepared, tmp_path):
    options, nanny = cluster
    child = start(*options, sources=library, out=tmp_path / "out")
    victim = processes_of_workers(nanny)[0]
    victim.suspend()
    try:
        with pytest.raises(subprocess.TimeoutExpired):  # it has jobs, perhaps the first one
            child.wait(HELD_SECONDS)
    finally:
        victim.kill()
    _, said = child.communicate(timeout=TIMEOUT_SECONDS)
    assert child.returncode == 0, said
    assert contents(tmp_path / "out") == contents(prepared)


def test_ctrl_c_ends_it_and_what_was_done_is_kept(cluster, library, prepared, tmp_path):
    options, nanny = cluster
    child = start(*options, sources=library, out=tmp_path / "out")
    held = processes_of_workers(nanny)
    for process in held:
        process.suspend()
    try:
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        for process in held:
            process.resume()
    assert child.returncode == INTERRUPTED_EXIT_CODE, said
    assert "the same command continues" in said
    assert "Traceback" not in said
    prepare([str(library)], out=tmp_path / "out", options=PrepareOptions(vocab=300))
    assert contents(tmp_path / "out") == contents(prepared)


def test_certificates_of_another_authority_open_nothing(cluster, library, tmp_path):
    *options, _, _, _, _, _, _ = cluster[0]
    own = certificates(tmp_path / "own")
    assert "no Dask scheduler answers" in refused(*options, *own, sources=library, out=tmp_path / "out", code=5)


def test_a_scheduler_that_dies_is_named(library, tmp_path):
    """Its workers are held, so that there is work left when it dies."""
    with ExitStack() as stack:
        address = stack.enter_context(scheduler(tmp_path))
        options = ("--engine", "dask", "--scheduler", address)
        assert "has no workers" in refused(*options, sources=library, out=tmp_path / "none", code=5)
        nanny = stack.enter_context(workers(address, tmp_path / "worker"))
        child = start(*options, sources=library, out=tmp_path / "out")
        for process in processes_of_workers(nanny):
            process.suspend()
        port = int(address.rpartition(":")[2])
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                psutil.Process(connection.pid).kill()
        _, said = child.communicate(timeout=TIMEOUT_SECONDS)
        assert child.returncode == 5, said
        assert f"the scheduler {address} is gone" in said
        assert "Traceback" not in said


def test_a_worker_with_another_program_is_named(library, tmp_path):
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "src" / "cuadrilla" / "data" / "clean.py", "a") as file:
        file.write("# changed\n")
    (tmp_path / "hide.py").write_text("import sys\nsys.modules['cuadrilla'] = None\n")
    with scheduler(tmp_path) as address:
        options = ("--engine", "dask", "--scheduler", address)
        with workers(address, tmp_path / "other", env={"PYTHONPATH": str(tmp_path / "src")}):
            said = refused(*options, sources=library, out=tmp_path / "out", code=3)
        assert "code of the preparation" in said
        assert "Dask's process tcp://127.0.0.1:" in said
        with workers(address, tmp_path / "none", "--preload", tmp_path / "hide.py"):
            said = refused(*options, sources=library, out=tmp_path / "out", code=3)
        assert "cannot run cuadrilla" in said
        assert "cuadrilla[dask]" in said


def test_a_scheduler_without_our_program_is_named(library, tmp_path):
    (tmp_path / "hide.py").write_text("import sys\nsys.modules['cuadrilla'] = None\n")
    with scheduler(tmp_path, "--preload", tmp_path / "hide.py") as address, workers(address, tmp_path / "worker"):
        options = ("--engine", "dask", "--scheduler", address)
        said = refused(*options, sources=library, out=tmp_path / "out", code=3)
    assert f"Dask's process {address} cannot run cuadrilla" in said
