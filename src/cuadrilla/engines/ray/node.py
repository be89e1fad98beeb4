"""A machine that has joined a crew becomes a node of its Ray cluster, if Ray works between the two machines.

`cuadrilla join` asks first (`link/grpc_ray.py`) and says which condition decided. Ray runs as a child of it: `ray start
--block`, with the token in a file of this user's, and ends with it. When the head ends, the run has ended or its
coordinator is being started again: it is looked for, for a while.
"""

import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType

import psutil

from cuadrilla.config import Config
from cuadrilla.engines.ray.cluster import NAME_LABEL, RESOURCE, why_not, write_token
from cuadrilla.engines.worker import Prepare
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, LinkError
from cuadrilla.home import Joined
from cuadrilla.link.base import Refused
from cuadrilla.link.grpc_client import Connection
from cuadrilla.link.grpc_ray import admits
from cuadrilla.link.tls import Identity
from cuadrilla.log import TALK

STOP_SECONDS = 15.0
BACK_SECONDS = 25.0
"""A coordinator that was killed is back by then."""
PAUSE_SECONDS = 1.0
LOOK_SECONDS = 2.0

log = logging.getLogger(__name__)


class RayNode:
    """Ray on this machine, as a node of the cluster at `head`."""

    def __init__(self, *, head: str, token: str, host: str, name: str, folder: Path) -> None:
        self._token = folder / "ray.token"
        write_token(self._token, token)
        options = {
            "--address": head,
            "--node-ip-address": host,
            "--resources": json.dumps({RESOURCE: 1}),
            "--labels": f"{NAME_LABEL}={name}",
        }
        environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        self._process = subprocess.Popen(
            [*command, *(f"{option}={value}" for option, value in options.items())],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End Ray here. Safe to call twice."""
        family = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self._process.kill()  # it may wait for a head that has gone, a minute or longer
        for process in psutil.wait_procs(family, timeout=STOP_SECONDS)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._token.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How a machine that has joined a crew gets to its coordinator."""

    crew: Joined
    identity: Identity
    prepare: Prepare


def work_through_ray(ways: Ways) -> str | None:
    """Work as a node of the run's Ray cluster until that ends; why it ended. None: the crew link is to be used.

    Raises what `prepare` raises, and Refused.
    """
    worked, deadline = False, time.monotonic()
    signal.signal(signal.SIGTERM, _leave)
    while True:
        connection = Connection(ways.crew.address, identity=ways.identity)
        try:
            config, _ = ways.prepare(connection, connection.describe())
            node = _node_for(config, connection, ways.crew)
        except Refused:
            raise
        except LinkError:
            if not worked:
                return None  # the crew link has a patience of its own
            if time.monotonic() > deadline:
                return "the coordinator has gone"
            time.sleep(PAUSE_SECONDS)
            continue
        finally:
            connection.close()
        if node is None:
            return None
        try:
            _stay(node, ways)
        finally:
            node.stop()
        log.info("the coordinator is silent: looking for it", extra=TALK)
        worked, deadline = True, time.monotonic() + BACK_SECONDS


def _stay(node: RayNode, ways: Ways) -> None:
    """While Ray runs and the coordinator answers: Ray notices a minute later that its head is gone. Raises Refused."""
    connection = Connection(ways.crew.address, identity=ways.identity)
    try:
        while node.runs:
            connection.clock()
            time.sleep(LOOK_SECONDS)
    except Refused:
        raise
    except LinkError:
        pass
    finally:
        connection.close()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """So that Ray here is stopped on the way out."""
    raise SystemExit(INTERRUPTED_EXIT_CODE)


def _node_for(config: Config, connection: Connection, crew: Joined) -> RayNode | None:
    """This machine as a node, if the run uses Ray and Ray works between the two; says why."""
    if config.engine.kind == "local" or not config.engine.uses_ray:
        return None
    try:
        node = join_cluster(connection, coordinator=crew.address, name=crew.name, folder=crew.folder)
    except LinkError as error:
        log.info("through the crew link: %s", error.message, extra=TALK)
        return None
    log.info("through Ray: equal versions, and both machines reach each other", extra=TALK)
    return node


def join_cluster(connection: Connection, *, coordinator: str, name: str, folder: Path) -> RayNode:
    """Become a node. `coordinator`: HOST:PORT of the crew link. Raises LinkError with the condition that forbids it."""
    if reason := why_not():
        raise LinkError(reason)
    host, _, port = coordinator.rpartition(":")
    with socket.create_connection((host, int(port))) as way:
        mine: str = way.getsockname()[0]
    with socket.create_server((mine, 0)) as called_back:
        head, token = connection.ray_head(
            ray=metadata.version("ray"), python=platform.python_version(), port=called_back.getsockname()[1]
        )
    if not admits(head, token=token):
        raise LinkError(f"the head at {head} does not know the token that the coordinator gave")
    return RayNode(head=head, token=token, host=mine, name=name, folder=folder)
