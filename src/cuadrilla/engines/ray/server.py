"""The coordinator's side of the Ray transport: it starts workers as actors, hears them, and tells their deaths.

`RayServer` does for actors what `link.grpc_server.CrewServer` does for machines that dial in. A thread for each worker
holds one call of `outgoing` open; what it brings goes to the `Receiver`. Ray says at once when a process dies, and
starts it again, at most `MAX_RESTARTS` times; a silent one (frozen, cut off) is found by the coordinator's clock.

The driver owns the actors: when it dies, Ray ends them.

A paused node's actors keep what they have loaded and say nothing: they leave in order, and a Hello that was on its way
is answered with the same Stop.
"""

import logging
import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cuadrilla.engines.ray.cluster import DEVICES_LABEL, INSTALL, OFFER, RESOURCE
from cuadrilla.engines.ray.resources import name_of
from cuadrilla.engines.ray.worker import GROUPS, Arrays, Parcel, RayPlace, RayWorker, arrays_of, tensors_of
from cuadrilla.errors import CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import PAUSED, Goodbye, Hello, NodeReport, Progress, Stop, ToWorker, Version
from cuadrilla.link.names import MAX_DEVICES, node_of, worker_name
from cuadrilla.link.offer import Offer, OfferedFile, RunDescription
from cuadrilla.link.reports import report_from_wire
from cuadrilla.link.served import Receiver
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.plan.devices import uses_of
from cuadrilla.version import __version__

MAX_RESTARTS = 5
RESTART_SECONDS = 0.2
AGAIN_SECONDS = 30.0
"""A node whose worker ended with an error is tried again: its owner may have done what the error asked for."""
FINISH_SECONDS = 10.0
"""A worker that has been told to stop finishes its pass first; then its process is ended."""
BLOCK_BYTES = 16 * 2**20
NO_MODULE = "ModuleNotFoundError"
KEPT_UPLOADS = 4

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Attended:
    """A worker and the thread that listens to it."""

    place: RayPlace
    actor: Any
    thread: threading.Thread | None = None
    uploads: wire.Uploads
    joined: bool = False
    """It has said Hello, and was not lost since."""
    expected: bool = False
    """Its end is no news: it said goodbye, or was told to stop."""
    away: bool = False
    """It waits, because it was told to or by itself, and is to come again."""
    ended_at: float = math.inf


class RayServer:
    """Serves one run. `contribution`: what the tensors of an answer look like; `parameters`: those of a version."""

    _actor: type[RayWorker] = RayWorker

    def __init__(self, *, receiver: Receiver, offer: Offer, parameters: wire.Layout, contribution: wire.Layout) -> None:
        self._receiver = receiver
        self._offer = offer
        self._parameters = parameters
        self._contribution = contribution
        self._memory = wire.Memory(keep=KEPT_UPLOADS)
        self._lock = threading.Lock()
        self._workers: dict[str, Attended] = {}
        self._version: tuple[str, Any] = ("", None)
        self._open_ended = False
        self._told_to_offer = False
        self._closing = threading.Event()
        self._last_error: CuadrillaError | None = None
        self._paused: frozenset[str] = frozenset()

    def place(self, place: RayPlace) -> None:
        """Start a worker. Returns at once: it is heard of when it joins."""
        self.attend(place, self._start(place))

    def attend(self, place: RayPlace, actor: Any) -> None:
        """Listen to a worker that was started: an actor of `RayWorker`."""
        worker = Attended(place=place, actor=actor, uploads=wire.Uploads(self._contribution))
        worker.thread = threading.Thread(target=self._attend, args=(worker,), name=f"attends-{place.name}", daemon=True)
        with self._lock:
            older = self._workers.get(place.name)
            self._workers[place.name] = worker
            worker.away = node_of(place.name) in self._paused
        if older is not None:  # its node has gone, and came back before Ray has said so
            self._replace(older)
        if worker.away:
            _tell_to_wait([worker], waits=True)
        worker.thread.start()

    def _start(self, place: RayPlace) -> Any:
        options: dict[str, Any] = {
            "resources": {RESOURCE: 1},
            "num_cpus": 0,
            "num_gpus": place.num_gpus,
            "max_restarts": MAX_RESTARTS,
        }
        if place.node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node, soft=False)
        actor_class = ray.remote(concurrency_groups=GROUPS)(self._actor)
        return actor_class.options(**options).remote(place, self._description(), *self._more())

    def _more(self) -> tuple[Any, ...]:
        """What its actors are told beside their place and the run."""
        return ()

    def place_on_new_nodes(self, *, own: str) -> None:
        """A worker for each device of each node that offers itself; also again after a while. `own`: not there."""
        self._open_ended = True
        there = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
        nodes = {node["NodeID"] for node in there}
        places = [place for node in there for place in places_of(node)]
        for place in places:
            if not self._is_taken(place, nodes=nodes):
                log.info("%s can be reached by Ray", place.name, extra=TALK)
                self.place(place)
        if not own and not places and not self._told_to_offer:
            self._told_to_offer = True
            log.warning("no machine of the Ray cluster offers itself; on each that is to work: ray start … %s", OFFER)

    def _is_taken(self, place: RayPlace, *, nodes: Collection[str]) -> bool:
        """Whether such a worker is there, or ended a moment ago: of this node, or of another one of `nodes` that bears
        the same name.
        """
        with self._lock:
            worker = self._workers.get(place.name)
        if worker is None or worker.ended_at + AGAIN_SECONDS <= monotonic():
            return False
        return worker.place.node == place.node or worker.place.node in nodes

    def send(self, worker: str, message: ToWorker) -> None:
        """Put a message on its way; a worker that has not joined gets nothing.

        A `Version`'s parameters are copied now: the weights of record may change before the worker has read them.
        """
        name = ""
        refs: tuple[Any, ...] = ()
        if isinstance(message, Version):
            name = wire.version_name(message.version)
            if self._version[0] != name:
                assert isinstance(message.parameters, Mapping)
                self._version = (name, ray.put(arrays_of(message.parameters)))
            refs = (self._version[1],)
        with self._lock:
            attended = self._workers.get(worker)
        if attended is not None and attended.joined:
            if isinstance(message, Stop):
                attended.joined = False
                attended.expected = not message.again
            attended.actor.deliver.remote(wire.to_worker(message, parameters=name).SerializeToString(), refs)

    def holds(self, worker: str) -> bool:
        """Whether that worker has come by this transport and is there: a node may come back by another one."""
        with self._lock:
            return worker in self._workers and self._workers[worker].joined

    def pause(self, nodes: frozenset[str]) -> None:
        """Workers of these nodes are to wait, and no others: they leave in order, and come back when they may."""
        with self._lock:
            begun, ended, self._paused = nodes - self._paused, self._paused - nodes, nodes
            workers = list(self._workers.values()) if begun or ended else []
            held = [worker for worker in workers if worker.joined and node_of(worker.place.name) in begun]
            for worker in held:
                worker.joined, worker.expected, worker.away = False, True, True
        _tell_to_wait([worker for worker in workers if node_of(worker.place.name) in begun], waits=True)
        _tell_to_wait([worker for worker in workers if node_of(worker.place.name) in ended], waits=False)
        for worker in held:
            _stop_for_now(worker)
            self._receiver.reported(worker.place.name, NodeReport(phase="paused"))
            self._receiver.left(worker.place.name, PAUSED)

    def end(self, worker: str, reason: str) -> None:
        """Send a worker home for good, and say so."""
        self.send(worker, Stop(reason=reason, refused=True))
        self._receiver.left(worker, reason)

    def may_have_workers(self) -> bool:
        """Whether a process is there or is being started, or a machine with one may still come."""
        with self._lock:
            if self._open_ended:
                return True
            return any(worker.thread and worker.thread.is_alive() for worker in self._workers.values())

    def pids(self) -> dict[str, int]:
        """Process numbers of the workers, on their own machines. Waits until each has started."""
        with self._lock:
            actors = {name: worker.actor for name, worker in self._workers.items()}
        return {name: ray.get(actor.pid.remote()) for name, actor in actors.items()}

    def failure(self) -> CuadrillaError:
        """Why there is no worker left."""
        return self._last_error or EnvironmentProblem(
            "all worker processes were killed", hint="run the same command again: it continues"
        )

    def disband(self, reason: str) -> None:
        """End everybody at once and say so: their work goes to others. Then the server is closed."""
        self._closing.set()
        with self._lock:
            joined = [worker for worker in self._workers.values() if worker.joined]
        for worker in joined:
            worker.joined = False
            self._receiver.left(worker.place.name, reason)
        self.close(finish_seconds=0.0)

    def close(self, *, finish_seconds: float = FINISH_SECONDS) -> None:
        """Send everybody home; whoever does not go in time is ended, at once where it has no session to finish."""
        with self._lock:
            workers = list(self._workers.values())
            away = [worker for worker in workers if worker.away]
        for worker in workers:
            self.send(worker.place.name, Stop(reason=Message("the run has ended")))
        self._closing.set()
        for patience in (finish_seconds, None):
            for worker in workers:
                assert worker.thread is not None
                worker.thread.join(timeout=0.0 if worker in away and patience is not None else patience)
                if worker.thread.is_alive():
                    ray.kill(worker.actor)

    # -- one worker ----------------------------------------------------------------------------------------------------

    def _attend(self, worker: Attended) -> None:
        """Hear a worker until its run ends, over restarts of its process."""
        done = worker.actor.run.remote()
        while True:
            try:
                if self._hear(worker, *ray.get(worker.actor.outgoing.remote())):
                    self._ended(worker, ray.get(done))
                    return
            except RayTaskError as error:
                self._ended(worker, {"error": f"{type(error.cause).__name__}: {error.cause}", "exit_code": 1})
                return
            except RayActorError as error:
                self._lose(worker, _first_line(error))
                if ray.wait([done], timeout=RESTART_SECONDS)[0]:  # not to be started again
                    self._failed(worker, error)
                    return
                if self._waits(worker):  # the new process does not know
                    _tell_to_wait([worker], waits=True)
            except (RayError, OSError) as error:  # its node has gone for good; a file that it asks for cannot be read
                self._failed(worker, error)
                return

    def _hear(self, worker: Attended, micro_steps: int, parcels: list[Parcel]) -> bool:
        """Whether these were its last words."""
        if worker.joined:
            self._receiver.heard(worker.place.name, Progress(micro_steps=micro_steps))
        for parcel in parcels:
            match parcel.kind:
                case "message":
                    self._take_message(worker, parcel.message)
                case "upload":
                    self._take_upload(worker, parcel)
                case "fetch":
                    worker.actor.answer.remote(self._block(parcel.name, parcel.offset))
        return any(parcel.kind == "ended" for parcel in parcels)

    def _replace(self, older: Attended) -> None:
        """Another process is this worker now: what the older one still says does not count, nor does its death."""
        with self._lock:
            was_there, older.joined, older.expected = older.joined, False, True
        if was_there:
            self._receiver.left(older.place.name, Message("a newer session of the same node has begun"))
        ray.kill(older.actor)

    def _is_newest(self, worker: Attended) -> bool:
        with self._lock:
            return self._workers.get(worker.place.name) is worker

    def _take_message(self, worker: Attended, encoded: bytes) -> None:
        if not self._is_newest(worker):
            return
        said = pb.ToCoordinator.FromString(encoded)
        if said.WhichOneof("kind") == "report":
            if worker.joined:
                self._receiver.reported(worker.place.name, report_from_wire(said.report))
            return
        try:
            message = wire.from_worker(said, uploads=worker.uploads)
        except LinkError as error:
            log.warning("%s: %s", worker.place.name, error.message)
            self.end(worker.place.name, error.message)
            return
        if isinstance(message, Goodbye):
            worker.joined, worker.expected, worker.away = False, True, worker.away or not worker.expected
        elif isinstance(message, Hello):
            if not self._admit(worker):
                return
            log.info("%s joined", worker.place.name, extra=TALK)
        self._receiver.deliver(worker.place.name, message)

    def _admit(self, worker: Attended) -> bool:
        """Whether a worker that comes may work now; one that may not is told to wait."""
        with self._lock:  # a pause either finds it here, or is found
            waits = node_of(worker.place.name) in self._paused
            worker.joined, worker.expected, worker.away = not waits, waits, waits
        if waits:
            _tell_to_wait([worker], waits=True)
            _stop_for_now(worker)
        return not waits

    def _waits(self, worker: Attended) -> bool:
        with self._lock:
            return node_of(worker.place.name) in self._paused

    def _take_upload(self, worker: Attended, parcel: Parcel) -> None:
        try:
            layout = self._contribution.part(pb.Chunk.FromString(parcel.message).tensors)
            arrays: Arrays = ray.get(parcel.refs[0])
            worker.uploads.put(parcel.name, tensors_of(arrays, layout=layout, memory=self._memory))
        except LinkError as error:
            log.warning("%s: %s", worker.place.name, error.message)
        except RayError as error:  # its process has died, and the tensors with it
            self._lose(worker, _first_line(error))
        worker.actor.answer.remote()

    def _lose(self, worker: Attended, reason: str) -> None:
        """Its process has died, or works no more; said once for each time that it was there."""
        if worker.expected or self._closing.is_set():
            return
        log.warning("%s left: %s", worker.place.name, reason)
        worker.joined, worker.expected = False, True
        self._receiver.left(worker.place.name, reason)

    def _failed(self, worker: Attended, error: RayError | OSError) -> None:
        reason = _first_line(error)
        hint = Message("on that machine: {command}", command=INSTALL) if NO_MODULE in reason else ""
        self._ended(worker, {"error": reason, "hint": hint, "exit_code": EnvironmentProblem.exit_code})

    def _ended(self, worker: Attended, result: Mapping[str, str | int]) -> None:
        worker.ended_at = monotonic()
        if "error" not in result or self._closing.is_set() or not self._is_newest(worker):
            return
        error = CuadrillaError(str(result["error"]), hint=str(result.get("hint", "")))
        error.exit_code = int(result["exit_code"])
        self._last_error = error
        if error.hint:
            log.warning("%s: %s", worker.place.name, error.hint)
        self._lose(worker, error.message)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _description(self) -> RunDescription:
        files = tuple(
            OfferedFile(path=path, sha256=sha256, num_bytes=here.stat().st_size)
            for path, (here, sha256) in self._offer.files.items()
        )
        return RunDescription(config=self._offer.config, files=files, cuadrilla=__version__)

    def _block(self, name: str, offset: int) -> bytes:
        path: Path | None = {sha256.hex(): here for here, sha256 in self._offer.files.values()}.get(name)
        if path is None:
            return b""
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(BLOCK_BYTES)


def places_of(node: Mapping[str, Any]) -> list[RayPlace]:
    """The workers for a node, as `ray.nodes()` describes it: one for each device that `cuadrilla join` has named there,
    else as many as the node has of our resource, its cards first.
    """
    labels, resources = node.get("Labels", {}), node["Resources"]
    name = name_of(node)
    room, cards = min(MAX_DEVICES, int(resources.get(RESOURCE, 0))), int(resources.get("GPU", 0))
    if room <= 1:
        return [RayPlace(name=name, num_gpus=min(1, cards), node=node["NodeID"])] * room
    named = [device for device in labels.get(DEVICES_LABEL, "").replace("-", ":").split("_")[:room] if device]
    here = [f"cuda:{index}" for index in range(min(room, cards))]
    uses = uses_of(named or [*here, *["cpu"] * (room - len(here))], cores=int(resources.get("CPU", 1)))
    try:
        return [
            RayPlace(
                name=worker_name(name, use.name),
                device=use.device,
                num_gpus=int(use.device == "cuda"),
                threads=use.threads,
                node=node["NodeID"],
            )
            for use in uses
        ]
    except LinkError as error:  # its owner writes the labels
        log.warning("%s: %s", name, error.message)
        return []


def _tell_to_wait(workers: Iterable[Attended], *, waits: bool) -> None:
    """Beside its session: it may have none."""
    for worker in workers:
        worker.actor.pause.remote(waits)


def _stop_for_now(worker: Attended) -> None:
    """End its session; it asks for another one once it may."""
    worker.actor.deliver.remote(wire.to_worker(Stop(reason=PAUSED, again=True)).SerializeToString())


def _first_line(error: RayError | OSError) -> str:
    """Ray's texts have many lines; the first says what. What is not installed is said further below."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if NO_MODULE in line), lines[0])
