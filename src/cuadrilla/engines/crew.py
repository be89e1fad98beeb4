"""The crew engine: this process coordinates; workers are processes that dial in, here or on other machines.

Worker processes of this machine are children that get their own keys, in a private temporary folder, and end when
this process ends: their standard input is a pipe from here. A child that dies is reported by its connection at once;
the others go on. Without any worker the coordinator waits, unless all the workers it could have were its children.
"""

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cuadrilla.config import Config, CrewEngine
from cuadrilla.engines.children import Children
from cuadrilla.engines.devices import Devices
from cuadrilla.engines.ray.cluster import RunCluster, cluster_of
from cuadrilla.engines.reporting import lines_kept, machine_facts, reporting
from cuadrilla.engines.transports import NO_LISTENER, RayTransport, RayUse, Transports, open_transports
from cuadrilla.home import Home
from cuadrilla.link.grpc_server import CrewServer
from cuadrilla.link.names import COORDINATOR
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.tls import CoordinatorKeys, key_hash, node_request, save_node
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import RunDir, private_folder, storage_errors
from cuadrilla.train.coordinate import Outcome
from cuadrilla.train.setup import RunContext
from cuadrilla.train.thread import CoordinatorThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenCrew:
    """An open crew: what an engine tells its caller once workers can come. `pids`: its own worker processes.

    `address` and `key_hash` are those of the crew link; empty where Ray alone is used.
    """

    address: str
    key_hash: bytes
    pids: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Whose crew it is. `home` holds the keys of this machine's crew; without one it is practice, and the keys last as
    long as the run. `opened` is called once workers can dial in, `moved` with an address that came later. `standbys`:
    nodes that may copy keys and run. `ray_nodes`: nodes that may run programs here, through Ray. `cluster`: Ray, if its
    start has begun already; whoever began it ends it. `listener`: a descriptor of the crew's port, if this process's
    parent holds it. `lending`: the crew is open already, and lends some of its machines; nothing else counts then.
    """

    home: Home | None = None
    opened: Callable[[OpenCrew], None] | None = None
    moved: Callable[[str], None] | None = None
    standbys: frozenset[str] = frozenset()
    ray_nodes: frozenset[str] = frozenset()
    cluster: RunCluster | None = None
    listener: int = NO_LISTENER
    lending: "Lending | None" = None


@dataclass(frozen=True, kw_only=True)
class OwnWorker:
    """A worker process of this machine. `speed`: beside the others, in practice."""

    name: str
    speed: float
    use: Use


@dataclass(frozen=True, kw_only=True)
class Lender:
    """An open crew: its server, its keys, and who is in it."""

    server: CrewServer
    keys: CoordinatorKeys
    listed: AllowList


@dataclass(frozen=True, kw_only=True)
class Lending:
    """Who trains a run, and the crew that lends them. `name`: of the run on the link. `nodes`: machines that have
    joined; `own`: workers of this machine, which get keys for as long as the run."""

    lender: Lender
    name: str
    nodes: Sequence[str]
    own: Sequence[OwnWorker]


def run_crew(context: RunContext, run: RunDir, *, opening: Opening) -> Outcome:
    """Train with a crew to the end, or to the stop that was asked for. Raises whatever made the run fail."""
    with coordinating(context, run) as private, ExitStack() as stack:
        if opening.cluster is None:
            opening = replace(opening, cluster=stack.enter_context(_cluster(context, run, opening=opening)))
        return _run(context, run, opening=opening, private=private)


@contextmanager
def coordinating(context: RunContext, run: RunDir) -> Iterator[Path]:
    """A block in which this thread coordinates a run, and says how this machine is; a folder for keys."""
    before = torch.get_num_threads()
    if context.config.sync.strict:
        torch.set_num_threads(context.config.train.threads or 1)
    send = partial(context.coordination.reported, COORDINATOR)
    try:
        with (
            private_folder() as private,
            lines_kept() as lines,
            reporting(send, facts=machine_facts(), folder=run.path, lines=lines),
        ):
            yield private
    finally:
        context.store.close()
        torch.set_num_threads(before)


def _cluster(context: RunContext, run: RunDir, *, opening: Opening) -> AbstractContextManager[RunCluster | None]:
    return cluster_of(context.config.engine, run, practice=opening.home is None, nodes=opening.ray_nodes)


def _run(context: RunContext, run: RunDir, *, opening: Opening, private: Path) -> Outcome:
    engine, home = context.config.engine, opening.home
    assert isinstance(engine, CrewEngine)
    workers = _own_workers(context.config, crew=home is not None)
    place = partial(_place_in_ray, workers, engine=engine, run=run)
    ray = RayUse(cluster=opening.cluster, nodes=opening.ray_nodes, opened=place)
    runtime = CoordinatorThread(context.coordination)
    children = OwnWorkers(engine=engine, run=run, event=context.store.event)
    try:
        with open_transports(
            context,
            runtime,
            run,
            home=home,
            private=private,
            ray=ray,
            standbys=opening.standbys,
            listener=opening.listener,
        ) as transports:
            if transports.ray is None and transports.link is not None:
                for worker in workers:
                    identity = private / worker.name
                    let_in(worker.name, identity, keys=transports.link.keys, nodes=transports.link.nodes)
                    children.start_worker(worker, address=transports.link.server.direct_address, identity=identity)
            if opening.opened is not None:
                opening.opened(_describe(transports, children))
            return _coordinate(context, runtime, transports, children, opening=opening)
    finally:
        children.end()


def _own_workers(config: Config, *, crew: bool) -> list[OwnWorker]:
    """Of a crew, one for each device that works; of a practice crew, one for each speed. Raises DeviceError."""
    engine = config.engine
    assert isinstance(engine, CrewEngine)
    if not crew or engine.workers != [1.0]:
        threads = 1 if len(engine.workers) > 1 else 0
        kind = "here" if crew else "worker"
        return [
            OwnWorker(name=f"{kind}-{number}", speed=speed, use=Use(name="", device="", threads=threads))
            for number, speed in enumerate(engine.workers, start=1)
        ]
    choice = Devices(engine.devices).choose(config)
    for note in choice.notes:
        log.info("%s", note, extra=TALK)
    return [OwnWorker(name=f"here-{number}", speed=1.0, use=use) for number, use in enumerate(choice.uses, start=1)]


def _place_in_ray(workers: Sequence[OwnWorker], transport: RayTransport, *, engine: CrewEngine, run: RunDir) -> None:
    """Workers on this machine, where the run directory is, as actors."""
    from cuadrilla.engines.ray.worker import RayPlace

    if not transport.cluster.ours:  # it has its own machines: they are found as they offer themselves
        return
    for worker in workers:
        on_card = worker.use.device.startswith("cuda")
        place = RayPlace(
            name=worker.name,
            speed=worker.speed,
            link=engine.link,
            threads=worker.use.threads,
            device="cuda" if on_card else worker.use.device,
            num_gpus=int(on_card),
            folder=str(run.path),
            node=transport.cluster.node,
        )
        transport.server.place(place)


def _describe(transports: Transports, children: "OwnWorkers") -> OpenCrew:
    pids = children.pids() if transports.ray is None else transports.ray.server.pids()
    if transports.link is None:
        return OpenCrew(address="", key_hash=b"", pids=pids)
    return OpenCrew(
        address=str(transports.link.reached.address),
        key_hash=key_hash(transports.link.keys.identity.certificate),
        pids=pids,
    )


def let_in(name: str, folder: Path, *, keys: CoordinatorKeys, nodes: AllowList) -> None:
    """Keys for a worker process of this machine, for as long as this run; those of an earlier run are forgotten."""
    if name in nodes.nodes():
        nodes.remove(name)
    _, certificate = keys.sign(node_request(folder, name=name))
    save_node(folder, certificate=certificate, ca=keys.identity.ca, server=keys.identity.certificate)
    nodes.add(name, certificate=certificate)


def _coordinate(
    context: RunContext, runtime: CoordinatorThread, transports: Transports, children: "OwnWorkers", *, opening: Opening
) -> Outcome:
    home = opening.home

    def look() -> None:
        transports.look(home=home)
        address = transports.link.reached.follow() if transports.link is not None else None
        if address is not None and opening.moved is not None:
            opening.moved(str(address))
        children.look()
        if home is None and not children.alive and not (transports.ray and transports.ray.server.may_have_workers()):
            context.coordination.fail(transports.ray.server.failure() if transports.ray else children.failure())

    return runtime.serve(look)


class OwnWorkers(Children):
    """The worker processes of this machine."""

    def __init__(self, *, engine: CrewEngine, run: RunDir, event: Callable[..., None]) -> None:
        super().__init__(died=self._say_died)
        self._engine = engine
        self._run = run
        self._event = event

    def start_worker(self, worker: "OwnWorker", *, address: str, identity: Path) -> None:
        """Secrets are in the identity's folder, never among the arguments."""
        arguments = {
            "--address": address,
            "--identity": str(identity),
            "--folder": str(self._run.path),
            "--name": worker.name,
            "--speed": str(worker.speed),
            "--link": self._engine.link,
            "--threads": str(worker.use.threads),
            "--device": worker.use.device,
        }
        command = [sys.executable, "-m", "cuadrilla", "--json", "work", *itertools.chain(*arguments.items())]
        with storage_errors(self._run.logs), open(self._run.logs / f"{worker.name}.txt", "ab") as talk:
            self.start(worker.name, command, environment=worker.use.environment, stderr=talk)

    def _say_died(self, name: str, reason: Message) -> None:
        log.warning("%s died: %s", name, reason)
        self._event("died", worker=name, reason=reason)
