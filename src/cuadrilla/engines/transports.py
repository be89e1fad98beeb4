"""The ways into a crew that are open in one run: the crew link, Ray, or both. A worker uses one of them."""

import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuadrilla.config import CrewEngine
from cuadrilla.engines.bundle import offer
from cuadrilla.engines.crew_address import CrewAddress
from cuadrilla.engines.ray.cluster import Cluster, RunCluster, why_no_cluster
from cuadrilla.engines.ray.resources import Resources, read_resources
from cuadrilla.errors import CuadrillaError, ResourceError
from cuadrilla.home import Home
from cuadrilla.link.address import Address
from cuadrilla.link.base import ToWorker
from cuadrilla.link.gate import bind
from cuadrilla.link.grpc_ray import RayHeadServer, RayOffer
from cuadrilla.link.grpc_server import CrewServer
from cuadrilla.link.grpc_standby import StandbyServer
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.tls import CoordinatorKeys, open_coordinator
from cuadrilla.link.wire import Layout
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, write_json
from cuadrilla.train.setup import RunContext
from cuadrilla.train.thread import CoordinatorThread

if TYPE_CHECKING:
    from cuadrilla.engines.ray.server import RayServer

LOOK_SECONDS = 1.0
TELL_SECONDS = 5.0
NO_LISTENER = -1

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LinkTransport:
    """The crew link: its server, where it listens, and the crew's keys."""

    server: CrewServer
    reached: CrewAddress
    keys: CoordinatorKeys
    nodes: AllowList


@dataclass(frozen=True, kw_only=True)
class RayTransport:
    server: "RayServer"
    cluster: Cluster


@dataclass(frozen=True, kw_only=True)
class RayUse:
    """How a run uses Ray. `cluster` None: not at all. `nodes`: who may have its token, if they want it. `opened` is
    called with each transport: after a kick there is a new one.
    """

    cluster: RunCluster | None
    nodes: frozenset[str] = frozenset()
    opened: Callable[[RayTransport], None]


class Transports:
    """What is open, filled while it is opened. At least one is there, unless Ray is being started again."""

    def __init__(self, *, use: RayUse, make_server: "Callable[[], RayServer]", run: RunDir) -> None:
        self.link: LinkTransport | None = None
        self.ray: RayTransport | None = None
        self.heads = RayHeadServer(names=use.nodes)
        self._use = use
        self._make_server = make_server
        self._run = run
        self._told: Resources | None = None
        self._told_at = -TELL_SECONDS
        self._looked_at = 0.0

    def send(self, worker: str, message: ToWorker) -> None:
        """Put a message on its way, through the transport by which the worker came."""
        if self.ray is not None and self.ray.server.holds(worker):
            self.ray.server.send(worker, message)
        elif self.link is not None:
            self.link.server.send(worker, message)

    def look(self, *, home: Home | None) -> None:
        """Who may not work any more, who may come: a few times a second."""
        paused = home.paused_nodes if home is not None else frozenset[str]()
        if self.link is not None:
            self.link.server.end_kicked()
            if home is not None:
                self.link.server.adopt_invites(home.take_invites())
                self.link.server.pause(paused)
        if self.ray is not None:
            self.ray.server.pause(paused)
        if self.ray is not None and time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._looked_at = time.monotonic()
            cluster = self.ray.cluster
            self._tell_resources(cluster)
            if not cluster.practice:
                self.ray.server.place_on_new_nodes(own=cluster.node if cluster.ours else "")
                self._renew_for_kicked(self.ray.server)
        elif self.ray is None and self._use.cluster is not None and self._use.cluster.is_there():
            self._open_ray_again(self._use.cluster)

    def open_ray(self, cluster: Cluster) -> None:
        """Let workers come through this cluster. A running one of others gets no nodes from us: its token is theirs."""
        self.ray = RayTransport(server=self._make_server(), cluster=cluster)
        dashboard = Message("without a dashboard")
        if cluster.dashboard:
            dashboard = Message("its dashboard at http://{address}", address=cluster.dashboard)
        log.info("Ray runs at %s, %s", cluster.address, dashboard, extra=TALK)
        self.heads.offer(_offer_of(cluster) if cluster.ours and not cluster.practice else None)
        self._use.opened(self.ray)

    def close_ray(self) -> None:
        self._run.ray.unlink(missing_ok=True)
        if self.ray is not None:
            self.ray.server.close()

    def _tell_resources(self, cluster: Cluster) -> None:
        """For `cuadrilla nodes`, which cannot ask a cluster of ours: the token is not given to it."""
        if time.monotonic() - self._told_at < TELL_SECONDS:
            return
        self._told_at = time.monotonic()
        found = read_resources(cluster.address)
        if found != self._told:
            with suppress(ResourceError):  # a full disk is no reason to stop
                write_json(self._run.ray, {"pid": os.getpid(), **asdict(found)}, private=True)
        self._told = found

    def _renew_for_kicked(self, server: "RayServer") -> None:
        """Whoever was kicked and has the token could go on running programs in the cluster: it is replaced."""
        if self.link is None or self._use.cluster is None:
            return
        kicked = self.heads.kicked(self.link.nodes.nodes().values())
        if kicked:
            names = ", ".join(kicked)
            log.info("%s had the token of the Ray cluster: that cluster ends, and a new one begins", names, extra=TALK)
            self.heads.withdraw()
            self.ray = None
            reason = Message("the Ray cluster ended because {names} was kicked", names=names)
            self._use.cluster.replace(partial(server.disband, reason))

    def _open_ray_again(self, cluster: RunCluster) -> None:
        try:
            self.open_ray(cluster.wait())
        except CuadrillaError as error:
            log.warning("Ray is no longer used: %s", error.message)
            self.heads.offer(None)
            self._use = replace(self._use, cluster=None)


@contextmanager
def open_transports(
    context: RunContext,
    runtime: CoordinatorThread,
    run: RunDir,
    *,
    home: Home | None,
    private: Path,
    ray: RayUse,
    standbys: frozenset[str] = frozenset(),
    listener: int = NO_LISTENER,
) -> Iterator[Transports]:
    """The transports that this run's engine asks for; closed behind the block. Raises LinkError.

    `runtime` hears the workers. `home` holds the keys of this machine's crew; without one the keys last as long as the
    run. `standbys`: nodes that may copy keys and run. `listener`: see `Opening`.
    """
    engine = context.config.engine
    assert isinstance(engine, CrewEngine)
    offered = offer(context.config, run.path)
    layouts: dict[str, Any] = {
        "parameters": Layout.of(context.strategy.version_like(context.model)),
        "contribution": Layout.of(context.strategy.contribution_like(context.model)),
    }

    def ray_server() -> "RayServer":
        from cuadrilla.engines.ray.server import RayServer

        return RayServer(receiver=runtime, offer=offered, **layouts)

    transports = Transports(use=ray, make_server=ray_server, run=run)
    with ExitStack() as stack:
        context.coordination.open(transports.send)  # before anybody can come in
        stack.callback(transports.close_ray)
        if ray.cluster is not None:
            transports.open_ray(ray.cluster.wait())
        elif engine.kind == "auto":
            reason = why_no_cluster(engine, practice=home is None, nodes=ray.nodes)
            log.info("crew link for all machines: %s", reason, extra=TALK)
        if engine.uses_link:
            folder = home.crew if home else private / "crew"
            keys, nodes = open_coordinator(folder, now=datetime.now(UTC)), AllowList(folder / "nodes.json")
            standby = StandbyServer(names=standbys, keys=folder, run=run.path)
            server = CrewServer(
                keys=keys, nodes=nodes, receiver=runtime, offer=offered, ray=transports.heads, standby=standby,
                term=home.term if home else 0, **layouts,
            )  # fmt: skip
            stack.callback(server.close)
            port = server.serve(socket.socket(fileno=listener) if listener != NO_LISTENER else bind(engine.listen))
            reached = CrewAddress(server, Address(Address.parse(engine.listen).host, port))
            transports.link = LinkTransport(server=server, reached=reached, keys=keys, nodes=nodes)
        yield transports


def _offer_of(cluster: Cluster) -> RayOffer:
    ray, python = metadata.version("ray"), platform.python_version()
    return RayOffer(address=cluster.address, token=cluster.token, ray=ray, python=python)
