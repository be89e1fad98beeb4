"""Hygiene: every test leaves the process as it found it.

Environment variables, threads, child processes and network sockets are compared before and after each test. If a test
leaves something behind it fails; variables are then restored and children killed. Torch's number of threads and its
deterministic mode are restored silently, and torch is not imported for a test that did not import it. What fixtures of
a wider scope make does not count, since they are set up before this check.

A test's folder decides its tier: tests/unit/ is marked `unit`, and so on.
"""

import gc
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from cuadrilla.host.process import sleep_early
from cuadrilla.log import silence_grpc
from tests.schedule import uses_ray

silence_grpc()
sleep_early()

# Tests run side by side and start processes. On busy cores the threads of a small matrix product wait for each other,
# which costs a hundred times what they save. Tests of several threads set their number. Must precede torch's import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests must not write into the user's home of cuadrilla. The processes of xdist inherit this one from the first.
OWN_HOME = "CUADRILLA_HOME" not in os.environ
if OWN_HOME:
    os.environ["CUADRILLA_HOME"] = tempfile.mkdtemp(prefix="cuadrilla-tests-")

TIERS = ("unit", "inproc", "spawn", "rig", "docker", "browser", "hardware", "soak")
SMALL_DISK_BYTES = 2 * 2**20
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("fixed")  # the option --hypothesis-profile beats it

GRACE_SECONDS = 15.0  # a thread or child that was stopped may need a moment, on a loaded machine several seconds

# Libraries leave these behind by design.
LIBRARY_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "TOKENIZERS_PARALLELISM", "TF_CPP_", "GRPC_")
LIBRARY_THREADS = ("pytest_timeout", "tqdm_monitor", "TMonitor", "Dummy-", "asyncio_", "AnyIO worker thread")
LIBRARY_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")


@dataclass(frozen=True)
class Snapshot:
    variables: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[psutil.Process]
    sockets: frozenset[tuple[Any, ...]]


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LIBRARY_VARIABLES)}


def threads() -> frozenset[threading.Thread]:
    return frozenset(thread for thread in threading.enumerate() if not thread.name.startswith(LIBRARY_THREADS))


def child_pids() -> set[int]:
    """Direct children, unreaped ones included. Linux lists them in a file, a hundred times faster than psutil."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:
        return {process.pid for process in psutil.Process().children()}
    found: set[int] = set()
    for file in lists:
        try:
            found.update(int(pid) for pid in file.read_text().split())
        except OSError:  # the thread ended
            continue
    return found


def children() -> frozenset[psutil.Process]:
    found = []
    for pid in child_pids():
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
        except psutil.ZombieProcess:  # it has ended, and its parent did not wait for it
            command = ""
        except psutil.NoSuchProcess:
            continue
        if not any(name in command for name in LIBRARY_CHILDREN):
            found.append(process)
    return frozenset(found)


def sockets() -> frozenset[tuple[Any, ...]]:
    """Open internet sockets; on Linux psutil is asked only if there is a socket of any kind."""
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        descriptors = []
    if descriptors and not any(is_socket(number) for number in descriptors):
        return frozenset()
    try:
        connections = psutil.Process().net_connections(kind="inet")
    except (psutil.Error, OSError):
        return frozenset()
    return frozenset((connection.fd, connection.type, connection.laddr) for connection in connections)


def is_socket(number: str) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(int(number)).st_mode)
    except OSError:
        return False


def snapshot() -> Snapshot:
    return Snapshot(variables(), threads(), children(), sockets())


def left_over(read: Callable[[], frozenset[Any]], before: frozenset[Any]) -> frozenset[Any]:
    """What is there now and was not before; it gets GRACE_SECONDS to go away."""
    left = read() - before
    if left:
        gc.collect()  # an unreferenced socket in a reference cycle is closed by now
    deadline = time.monotonic() + GRACE_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = read() - before
    return left


def leaks(before: Snapshot) -> list[str]:
    """A line for each thing left behind. Variables are restored and children killed."""
    found = []
    now = variables()
    for name in sorted(set(now) | set(before.variables)):
        if now.get(name) != before.variables.get(name):
            found.append(f"environment variable {name} changed to {now.get(name)!r}")
            if name in before.variables:
                os.environ[name] = before.variables[name]
            else:
                os.environ.pop(name, None)
    found += [f"thread {thread.name!r} still runs" for thread in left_over(threads, before.threads)]
    left = left_over(children, before.children)
    for process in left:
        found.append(f"child process {process.pid} was left behind ({describe(process)})")
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(list(left), timeout=GRACE_SECONDS)
    found += [f"socket {address} is still open" for _, _, address in left_over(sockets, before.sockets)]
    return found


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.status()}: {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return "gone"


@pytest.fixture(autouse=True)
def hygiene() -> Iterator[None]:
    before = snapshot()
    torch = sys.modules.get("torch")
    num_threads = torch.get_num_threads() if torch else 0
    deterministic = torch.are_deterministic_algorithms_enabled() if torch else False
    yield
    if torch is not None:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(deterministic)
    found = leaks(before)
    if found:
        pytest.fail("left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a little prepared text. Read only."""
    from cuadrilla.data.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("stories") / "data"
    prepare(["cuentos:300"], out=folder, options=PrepareOptions(vocab=512), progress=lambda *_: None)
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of SMALL_DISK_BYTES, so that a full disk is a real one."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "cuadrilla-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        pytest.skip(f"needs the command mount: {error}")
    if done.returncode:
        pytest.skip(f"needs root to mount a small tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=True)


@pytest.hookimpl(optionalhook=True)
def pytest_unconfigure() -> None:
    if OWN_HOME:
        shutil.rmtree(os.environ["CUADRILLA_HOME"], ignore_errors=True)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.schedule import Groups

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder, and order the tests so that all processes of xdist end together.

    Tests of Ray, which must run one after another, come first; then the others, the longest time limits first.
    """
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if folder in TIERS and item.get_closest_marker(folder) is None:
            item.add_marker(folder)
    items.sort(key=lambda item: (not uses_ray(item.nodeid), -time_limit(item)))


def time_limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0
