"""Ray itself: started here for this run, or a running cluster that this run uses. Always with token authentication.

A cluster without a token runs code for whoever reaches it. So a cluster of ours gets a fresh token, in a file that only
this user can read; and a cluster of others must ask for one. In practice every port of Ray, its dashboard too, is on
the loopback. Ray is stopped as it was started: by its own handle, never by name.

Ray takes as long to start as a coordinator takes to load torch and its run, so it is started beside that. A coordinator
that was killed and is started again does without the dashboard, a third of what Ray's own processes compute.

Source of the variables and of the version check: docs.ray.io, "Token authentication"; ray/_private/services.py.
"""

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from cuadrilla.config import CrewEngine, LocalEngine
from cuadrilla.engines.supervise import was_restarted
from cuadrilla.errors import EnvironmentProblem, LinkError
from cuadrilla.link.grpc_ray import admits
from cuadrilla.log import FILE_FORMAT, libraries_apart, to_files_only
from cuadrilla.rundir import RunDir, make_private, private_folder, storage_errors

MIN_VERSION = (2, 56)
"""Older ones have known holes (CVE-2026-57516) or no token authentication."""
INSTALL = 'pip install "cuadrilla[ray]"'
LOOPBACK = "127.0.0.1"
RESOURCE = "cuadrilla"
"""A node that is to work says so with this custom resource: one for each worker."""
NAME_LABEL = "cuadrilla-node"


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
        return f"Ray is not installed: {INSTALL}"
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return f"Ray {version} is too old: {INSTALL}"
    if sys.platform != "linux":
        return "Ray joins machines under Linux only"
    return ""


Starting = Callable[[], Cluster | None]
"""Waits until the cluster of a run is there. None: the run has none. Raises EnvironmentProblem, LinkError."""


@contextmanager
def cluster_of(engine: LocalEngine | CrewEngine, run: RunDir, *, practice: bool) -> Iterator[Starting]:
    """Begin to start or to join what this engine asks for; it ends behind the block.

    One thread does it all and stays: Linux ends Ray's processes with the thread that started them. Ray's C++ writes its
    errors, and each signal that this process gets, to stderr: they are in `logs/ray.txt`.
    """
    if engine.kind == "local" or not engine.uses_ray or (engine.kind == "auto" and why_not()):
        yield lambda: None
        return
    make_private(run.logs)
    with libraries_apart(run.logs / "ray.txt"), ThreadPoolExecutor(1, thread_name_prefix="ray") as thread:
        stack = ExitStack()
        cluster = thread.submit(stack.enter_context, _wanted(engine, run, practice=practice))
        try:
            yield cluster.result
        finally:
            thread.submit(stack.close).result()


@contextmanager
def _wanted(engine: CrewEngine, run: RunDir, *, practice: bool) -> Iterator[Cluster]:
    if engine.ray_address:
        with joined(engine.ray_address) as cluster:
            yield cluster
        return
    host = LOOPBACK if practice else engine.listen.rpartition(":")[0]
    dashboard = not was_restarted(run)
    with (
        private_folder() as private,
        started(
            private=private, host=host, num_workers=len(engine.workers), practice=practice, dashboard=dashboard
        ) as cluster,
    ):
        yield cluster


@contextmanager
def started(*, private: Path, host: str, num_workers: int, practice: bool, dashboard: bool = True) -> Iterator[Cluster]:
    """Ray on this machine for as long as the block lasts; its ports on `host`. Raises EnvironmentProblem."""
    _require_ray()
    token = private / "ray.token"
    write_token(token, secrets.token_hex(32))
    environment = {"RAY_AUTH_TOKEN_PATH": str(token)}
    if host == LOOPBACK:
        # Ray takes the machine's address instead of the loopback, except where clusters are switched off.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with _variables(environment):
        settings = {
            "_node_ip_address": host,
            "dashboard_host": LOOPBACK,
            "include_dashboard": dashboard and _has_dashboard(),
            "num_cpus": os.cpu_count(),
            "resources": {RESOURCE: num_workers},
        }
        with _connected("local", settings=settings) as context:
            yield _describe(context, ours=True, practice=practice)


@contextmanager
def joined(address: str) -> Iterator[Cluster]:
    """A running cluster, with the token of this user. Raises EnvironmentProblem, LinkError."""
    _require_ray()
    token = read_token()
    if not token:
        raise EnvironmentProblem(
            f"no token for the Ray cluster at {address}: {token_file()} does not exist",
            hint="copy the head's token there, or name its file in RAY_AUTH_TOKEN_PATH; ray get-auth-token --generate",
        )
    if admits(address, token=""):
        raise EnvironmentProblem(
            f"the Ray cluster at {address} asks nobody for a token: everybody who reaches it can run code on it",
            hint="start it with RAY_AUTH_MODE=token; ray get-auth-token --generate makes one",
        )
    if not admits(address, token=token):
        raise LinkError(
            f"the Ray cluster at {address} refuses this token", hint=f"copy the head's token to {token_file()}"
        )
    with _variables({}), _connected(address, settings={}) as context:
        yield _describe(context, ours=False, practice=False)


def token_file() -> Path:
    """Where Ray looks for this user's token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def read_token() -> str:
    """This user's token, as Ray will find it; empty if there is none."""
    try:
        return os.environ.get("RAY_AUTH_TOKEN") or token_file().read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


@contextmanager
def _connected(address: str, *, settings: dict[str, Any]) -> Iterator[Any]:
    import ray

    to_files_only("ray")
    logs = {"log_to_driver": False, "logging_level": logging.INFO, "logging_format": FILE_FORMAT}
    try:
        context = ray.init(address=address, **logs, **settings)
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
        raise LinkError(f"no Ray cluster at {address}: {error}", hint="is its head running?") from None
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        text = " ".join(str(error).split())
        raise EnvironmentProblem(text, hint="install the same Ray and the same Python on all its machines") from None
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
    wanted = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", **environment}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
