"""Ray itself: started here for this run, or a running cluster that this run uses. Always with token authentication.

A cluster without a token runs code for whoever reaches it. So a cluster of ours gets a fresh token, in a file that only
this user can read; and a cluster of others must ask for one. In practice every port of Ray is on the loopback; else
Ray listens on all addresses of the machine, for which it has no setting (`docs/architecture.md` lists the ports), its
dashboard on the loopback. Its metrics, which ask for no token, are off. Ray is stopped as it was started: by its own
handle, never by name.

Invariants
* A run that nobody has been named for starts no Ray, other than for practice.
* Whatever Ray writes is below a folder that only this user can enter. (Ray makes its own folders writable for all.)
* A cluster is never given another token: it is ended, with all its processes, and another one is begun.

Ray takes as long to start as a coordinator takes to load torch and its run, so it is started beside that. A coordinator
that was killed and is started again does without the dashboard, a third of what Ray's own processes compute.

Source of the variables and of the version check: docs.ray.io, "Token authentication"; ray/_private/services.py,
dashboard/head.py, autoscaler/v2/monitor.py of Ray 2.60.
"""

import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from cuadrilla.config import CrewEngine, LocalEngine
from cuadrilla.engines.supervise import was_restarted
from cuadrilla.errors import EnvironmentProblem, LinkError
from cuadrilla.link.address import Address, lan_address
from cuadrilla.link.names import MAX_DEVICES
from cuadrilla.log import FILE_FORMAT, libraries_apart, to_files_only
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, make_private, private_folder, storage_errors

MIN_VERSION = (2, 56)
"""Older ones have known holes (CVE-2026-57516) or no token authentication."""
INSTALL = 'pip install "cuadrilla[ray]"'
LOOPBACK = "127.0.0.1"
RESOURCE = "cuadrilla"
"""A node that is to work says so with this custom resource: one for each worker."""
OFFER = f"--resources='{{\"{RESOURCE}\": 1}}'"
"""As it is typed behind `ray start`."""
NAME_LABEL = "cuadrilla-node"
DEVICES_LABEL = "cuadrilla-devices"
"""Of a node that is to work with several: such as cuda-0_cuda-1_cpu."""
PROGRESS_FILE = "CUADRILLA_PROGRESS_FILE"
"""Names the file in which a node's workers write how it goes, for who has joined there."""
SAID_SUFFIX = ".said"
"""Of the file beside it in which they write why they wait."""
COURTESY = "CUADRILLA_COURTESY"
"""What a node's owner asks of the workers there (`Courtesy.data`), as JSON."""
LONGEST_FOLDER = 8
"""A socket's name may have 107 bytes on Linux; what we and Ray put behind the usual folder's name takes up to 99."""
KILL_SECONDS = 10.0
LOOK_SECONDS = 2.0
NO_PORT = "-1"
TOKEN, TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
AUTH_MODE = "RAY_AUTH_MODE"
RAY_ADDRESS = "RAY_ADDRESS"
"""Ray sets it for a job."""
IN_A_JOB = "auto"
VARIABLES: dict[str, str] = {
    AUTH_MODE: "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    # These two metrics have no switch: they are served on all addresses, unless the port cannot be.
    "AUTOSCALER_METRIC_PORT": NO_PORT,
    "DASHBOARD_METRIC_PORT": NO_PORT,
    # Else a SIGTERM that comes behind the start of Ray aborts the coordinator instead of saving and stopping.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}
"""For every process of Ray that is started here."""
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray takes the machine's address instead of the loopback, except where clusters are switched off."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster that this process is connected to. `ours`: started here, and ended with this run.

    `practice`: on this machine alone. `node`: this machine in it.
    """

    address: str
    ours: bool
    practice: bool
    node: str
    dashboard: str
    token: str = field(repr=False)


def why_not() -> str:
    """Why Ray cannot be used in this installation, or nothing."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return Message("Ray is not installed: {command}", command=INSTALL)
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return Message("Ray {version} is too old: {command}", version=version, command=INSTALL)
    if sys.platform != "linux":
        return Message("Ray joins machines under Linux only")
    return ""


class RunCluster:
    """The cluster of a run, which may be replaced. One thread does it all and stays: Linux ends Ray's processes with
    the thread that started them.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Cluster]]) -> None:
        self._begin = begin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._stack = ExitStack()
        self._cluster: Future[Cluster] = self._thread.submit(self._enter)

    def wait(self) -> Cluster:
        """The cluster, once it is there. Raises EnvironmentProblem, LinkError."""
        return self._cluster.result()

    def is_there(self) -> bool:
        """Whether `wait` returns at once, or raises."""
        return self._cluster.done()

    def replace(self, part: Callable[[], None]) -> None:
        """End it, with all its processes, and begin another one. `part` leaves the old one, in the same thread."""
        self._cluster = self._thread.submit(self._another, part)

    def close(self) -> None:
        self._thread.submit(self._stack.close).result()
        self._thread.shutdown()

    def _enter(self) -> Cluster:
        return self._stack.enter_context(self._begin())

    def _another(self, part: Callable[[], None]) -> Cluster:
        part()
        self._stack.close()
        return self._enter()


@contextmanager
def cluster_of(
    engine: LocalEngine | CrewEngine, run: RunDir, *, practice: bool, nodes: frozenset[str] = frozenset()
) -> Iterator[RunCluster | None]:
    """Begin to start or to join what this engine asks for; it ends behind the block. `nodes`: who may come.

    Ray's C++ writes its errors, and each signal that this process gets, to stderr: they are in `logs/ray.txt`.
    """
    if why_no_cluster(engine, practice=practice, nodes=nodes):
        yield None
        return
    assert isinstance(engine, CrewEngine)
    make_private(run.logs)
    with libraries_apart(run.logs / "ray.txt"):
        cluster = RunCluster(partial(_wanted, engine, run, practice=practice))
        try:
            yield cluster
        finally:
            cluster.close()


def why_no_cluster(engine: LocalEngine | CrewEngine, *, practice: bool, nodes: frozenset[str]) -> str:
    """Why a run has no Ray, or nothing. `practice`: of this machine alone; else `nodes` may come."""
    if engine.kind == "local" or not engine.uses_ray:
        return Message('engine.kind is "{kind}"', kind=engine.kind)
    if engine.kind == "auto" and (reason := why_not()):
        return reason
    if not practice and not engine.ray_address and not nodes:
        return Message("no machine has been named for Ray (--ray-node)")
    return ""


@contextmanager
def _wanted(engine: CrewEngine, run: RunDir, *, practice: bool) -> Iterator[Cluster]:
    if engine.ray_address:
        with joined(engine.ray_address, without_token=engine.ray_without_token) as cluster:
            yield cluster
        return
    host = LOOPBACK if practice else Address.parse(engine.listen).host
    dashboard = not was_restarted(run)
    num_workers = len(engine.workers) if practice else max(MAX_DEVICES, len(engine.workers))
    with started(host=host, num_workers=num_workers, practice=practice, dashboard=dashboard) as cluster:
        yield cluster


@contextmanager
def started(*, host: str, num_workers: int, practice: bool, dashboard: bool = True) -> Iterator[Cluster]:
    """Ray on this machine for as long as the block lasts. Raises EnvironmentProblem."""
    _require_ray()
    family: list[psutil.Process] = []
    with private_folder(where=short_folder()) as private:
        token = private / "ray.token"
        write_token(token, secrets.token_hex(32))
        environment = {TOKEN_FILE: str(token)}
        if host == LOOPBACK:
            environment |= ON_LOOPBACK
        settings = {
            "_node_ip_address": host,
            "_temp_dir": str(private / "ray"),
            "dashboard_host": LOOPBACK,
            "include_dashboard": None if dashboard and _has_dashboard() else False,  # None: Ray goes on without it
            "num_cpus": os.cpu_count(),
            "resources": {RESOURCE: num_workers},
        }
        try:
            with _variables(environment), _connected("local", settings=settings) as context:
                try:
                    yield _describe(context, ours=True, practice=practice)
                finally:
                    family = _processes_of(private)
        finally:
            kill(family)  # an agent whose raylet is dead goes on for a minute, with the token and with open files


def short_folder() -> Path:
    """Where a private folder can be so that the names of Ray's sockets in it are not too long for the kernel."""
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= LONGEST_FOLDER else Path("/tmp")


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Ray's processes that this one has started with that folder, and theirs."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if str(folder) in " ".join(child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def kill(family: Sequence[psutil.Process]) -> None:
    """End these processes, if they are still there."""
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=KILL_SECONDS)


@contextmanager
def joined(address: str, *, without_token: bool = False) -> Iterator[Cluster]:
    """A running cluster, with the token of this user; `without_token`: also one that asks nobody for a token.

    `address`: HOST:PORT, or "auto" in a Ray job. Raises EnvironmentProblem, LinkError.
    """
    _require_ray()
    address = _head_address(address)
    token = read_token()
    if not token and not without_token:
        raise _no_token(address)
    from cuadrilla.link.grpc_ray import admits

    is_open = admits(address, token="")
    if is_open and not without_token:
        raise EnvironmentProblem(
            "the Ray cluster at {address} asks nobody for a token: everybody who reaches it can run code on it",
            address=address,
            hint="start it with RAY_AUTH_MODE=token (ray get-auth-token --generate makes one); to use it as it is: "
            "engine.ray_without_token = true",
        )
    if not is_open:
        _require_admitted(address, token=token)
    environment = ({AUTH_MODE: "disabled"} if is_open else {}) | (ON_LOOPBACK if _is_on_loopback(address) else {})
    with _variables(environment), _connected(address, settings={}) as context:
        yield _describe(context, ours=False, practice=False)


def _head_address(address: str) -> str:
    """HOST:PORT of a head. Raises LinkError."""
    if address == IN_A_JOB:
        address = os.environ.get(RAY_ADDRESS, "")
        if not address:
            raise LinkError(
                'engine.ray_address is "auto", but this is not a Ray job: RAY_ADDRESS is empty',
                hint='name the head: engine.ray_address = "HOST:6379"',
            )
    head = Address.parse(address)
    head.check_dialled()
    return str(head)


def _is_on_loopback(address: str) -> bool:
    """Whether that head listens on the loopback alone."""
    head = Address.parse(address)
    if not head.is_loopback:
        return False
    try:
        socket.create_connection((lan_address(), head.port), timeout=LOOK_SECONDS).close()
    except (OSError, LinkError):
        return True
    return False


def _no_token(address: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        "no token for the Ray cluster at {address}: {path} does not exist",
        address=address,
        path=token_file(),
        hint="copy the head's token there, or name its file in RAY_AUTH_TOKEN_PATH; ray get-auth-token --generate",
    )


def _require_admitted(address: str, *, token: str) -> None:
    """Raises EnvironmentProblem, LinkError."""
    if not token:
        raise _no_token(address)
    from cuadrilla.link.grpc_ray import admits

    if not admits(address, token=token):
        raise LinkError(
            "the Ray cluster at {address} refuses this token",
            address=address,
            hint="copy the head's token to {path}",
            path=token_file(),
        )


def token_file() -> Path:
    """Where Ray looks for this user's token."""
    return Path(os.environ.get(TOKEN_FILE) or Path.home() / ".ray" / "auth_token")


def read_token() -> str:
    """This user's token, as Ray will find it; empty if there is none."""
    try:
        return os.environ.get(TOKEN) or token_file().read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


@contextmanager
def _connected(address: str, *, settings: dict[str, Any]) -> Iterator[Any]:
    import ray
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled

    AuthenticationTokenLoader.instance().reset_cache()  # else a process keeps the token of its first cluster
    to_files_only("ray")
    logs = {"log_to_driver": False, "logging_level": logging.INFO, "logging_format": FILE_FORMAT}
    try:
        context = ray.init(address=address, **logs, **settings)
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
        problem = "no Ray cluster at {address}: {reason}"
        raise LinkError(problem, address=address, reason=error, hint="is its head running?") from None
    except (RuntimeError, TimeoutError) as error:
        hint = 'run the same command again, or use the crew link: engine.kind = "crew"'
        if "Version mismatch" in str(error):
            hint = "install the same Ray and the same Python on all its machines"
        raise EnvironmentProblem("{reason}", reason=" ".join(str(error).split()), hint=hint) from None
    try:
        yield context
    finally:
        ray.shutdown()


def _describe(context: Any, *, ours: bool, practice: bool) -> Cluster:
    info = context.address_info
    return Cluster(
        token=read_token(),
        address=info["address"],
        ours=ours,
        practice=practice,
        node=info["node_id"],
        dashboard=context.dashboard_url or "",
    )


def _require_ray() -> None:
    if reason := why_not():
        raise EnvironmentProblem(reason, hint='or use the crew link: engine.kind = "crew"')


def _has_dashboard() -> bool:
    """Ray's dashboard comes with ray[default]."""
    try:
        metadata.version("aiohttp-cors")
    except metadata.PackageNotFoundError:
        return False
    return True


def write_token(path: Path, token: str) -> None:
    """A file that only this user can read, from its first byte on. Raises ResourceError."""
    with storage_errors(path):
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="ascii") as file:
            file.write(token)


@contextmanager
def _variables(environment: dict[str, str]) -> Iterator[None]:
    """Ray is told these things by variables only; they are read when it is imported and by the processes it starts."""
    before = dict(os.environ)
    if TOKEN_FILE in environment:
        os.environ.pop(TOKEN, None)
    os.environ.update(settled(before, environment))
    try:
        yield
    finally:
        for name in {*VARIABLES, *environment, TOKEN}:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def settled(variables: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """`variables` with ours and `environment`. With a token's file in these, a token among those goes: Ray would take
    that one, which others may have.
    """
    kept = {name: value for name, value in variables.items() if name != TOKEN or TOKEN_FILE not in environment}
    return {**kept, **VARIABLES, **environment}
