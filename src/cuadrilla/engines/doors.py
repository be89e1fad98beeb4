"""The ways into a crew that are open in one run: the crew link, Ray, or both. A worker uses one of them."""

import logging
import platform
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuadrilla.config import CrewEngine
from cuadrilla.engines.bundle import offer
from cuadrilla.engines.ray.cluster import Cluster, why_not
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.host.card import Whereabouts
from cuadrilla.link.base import ToWorker
from cuadrilla.link.gate import bind
from cuadrilla.link.grpc_ray import RayOffer
from cuadrilla.link.grpc_server import CrewDesk
from cuadrilla.link.grpc_standby import StandbyDesk
from cuadrilla.link.invite import canonical_host
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.tls import Coordinator, open_coordinator
from cuadrilla.link.wire import Layout
from cuadrilla.log import TALK
from cuadrilla.rundir import RunDir
from cuadrilla.sync.exact import contribution_like, version_like
from cuadrilla.train.setup import Parts

if TYPE_CHECKING:
    from cuadrilla.engines.ray.desk import RayDesk

LOOK_SECONDS = 1.0
FOLLOW_SECONDS = 2.0
NO_LISTENER = -1

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LinkDoor:
    """The crew link: its desk, where it listens, and the crew's keys."""

    desk: CrewDesk
    address: str
    keys: Coordinator
    nodes: AllowList
    whereabouts: Whereabouts
    listened: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class RayDoor:
    desk: "RayDesk"
    cluster: Cluster


class Doors:
    """What is open, filled while it is opened. At least one is there."""

    def __init__(self) -> None:
        self.link: LinkDoor | None = None
        self.ray: RayDoor | None = None
        self._looked_at = 0.0
        self._followed_at = 0.0

    def send(self, worker: str, message: ToWorker) -> None:
        """Put a message on its way, through the door by which the worker came."""
        if self.ray is not None and self.ray.desk.holds(worker):
            self.ray.desk.send(worker, message)
        elif self.link is not None:
            self.link.desk.send(worker, message)

    def follow(self) -> str:
        """Listen at the address that this machine's card has now, if it is another one; it, or an empty text.

        The old one is listened at as well: it may come back.
        """
        if self.link is None or time.monotonic() - self._followed_at < FOLLOW_SECONDS:
            return ""
        self._followed_at = time.monotonic()
        door = self.link
        host = door.whereabouts.moved_to()
        if not host:
            return ""
        address = with_port(host, door.address.rpartition(":")[2])
        if address not in door.listened:
            try:
                door.desk.listen(bind(address))
            except LinkError as error:
                log.warning("this machine's address is %s now: %s", host, error.message)
                return ""
        listened = door.listened | {address}
        self.link = replace(door, address=address, whereabouts=Whereabouts(host), listened=listened)
        return address

    def look(self, *, home: Home | None) -> None:
        """Who may not work any more, who may come: a few times a second."""
        if self.link is not None:
            self.link.desk.end_kicked()
            if home is not None:
                self.link.desk.adopt_invites(home.take_invites())
        if self.ray is not None and time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._looked_at = time.monotonic()
            if not self.ray.cluster.practice:
                self.ray.desk.place_on_new_nodes()


@contextmanager
def open_doors(
    parts: Parts,
    run: RunDir,
    *,
    home: Home | None,
    private: Path,
    cluster: Cluster | None,
    standbys: frozenset[str] = frozenset(),
    listener: int = NO_LISTENER,
) -> Iterator[Doors]:
    """The doors that this run's engine asks for; closed behind the block. Raises LinkError.

    `home` holds the keys of this machine's crew; without one the keys last as long as the run. `cluster`: Ray's, if
    it is used. `standbys`: nodes that may copy keys and run. `listener`: see `Opening`.
    """
    engine = parts.config.engine
    assert isinstance(engine, CrewEngine)
    offered = offer(parts.config, run.path)
    layouts: dict[str, Any] = {
        "parameters": Layout.of(version_like(parts.model)),
        "contribution": Layout.of(contribution_like(parts.model, strict=parts.config.sync.strict)),
    }
    doors = Doors()
    with ExitStack() as stack:
        parts.coordination.open(doors.send)  # before anybody can come in
        if cluster is not None:
            from cuadrilla.engines.ray.desk import RayDesk

            ray_desk = RayDesk(receiver=parts.coordination, offer=offered, **layouts)
            stack.callback(ray_desk.close)
            doors.ray = RayDoor(desk=ray_desk, cluster=cluster)
            dashboard = f"its dashboard at http://{cluster.dashboard}" if cluster.dashboard else "without a dashboard"
            log.info("Ray runs at %s, %s", cluster.address, dashboard, extra=TALK)
        elif engine.kind == "auto":
            log.info("crew link for all machines: %s", why_not(), extra=TALK)
        if engine.uses_link:
            folder = home.crew if home else private / "crew"
            keys, nodes = open_coordinator(folder, now=datetime.now(UTC)), AllowList(folder / "nodes.json")
            ray = _ray_offer(cluster) if cluster is not None and not cluster.practice else None
            standby = StandbyDesk(names=standbys, keys=folder, run=run.path)
            desk = CrewDesk(
                keys=keys, nodes=nodes, receiver=parts.coordination, offer=offered, ray=ray, standby=standby,
                term=home.term if home else 0, **layouts,
            )  # fmt: skip
            stack.callback(desk.close)
            port = desk.serve(socket.socket(fileno=listener) if listener != NO_LISTENER else bind(engine.listen))
            host = engine.listen.rpartition(":")[0]
            address = f"{host}:{port}"
            doors.link = LinkDoor(
                desk=desk,
                address=address,
                keys=keys,
                nodes=nodes,
                whereabouts=Whereabouts(canonical_host(host)),
                listened=frozenset({address}),
            )
        yield doors


def with_port(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ray_offer(cluster: Cluster) -> RayOffer:
    ray, python = metadata.version("ray"), platform.python_version()
    return RayOffer(address=cluster.address, token=cluster.token, ray=ray, python=python)
