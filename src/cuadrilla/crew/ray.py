"""Ray as a launcher: the workers of a run are actors on the user's Ray cluster, and work over the crew link.

The coordinator is the cluster's driver. Ray reserves an actor's resources, restarts it when its process dies and keeps
its log. An actor runs the program of `cuadrilla join`; the ranks of a Ray Train run do so together, as one worker.
Machines outside the cluster join the same run with an invite. On the cluster a run's code needs no approval, because
anybody with Ray's token can run programs there already.

Invariants
* Nothing of the user's cluster is started or stopped here but our own actors, which end with the coordinator. Where
  Ray runs nowhere and no address is given, `ray.init` starts it on this machine for this run.
* A worker's credential is an argument of its actor: neither a command line, nor a variable, nor a log holds it.
"""

import logging
import os
import re
import signal
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cuadrilla.crew.children import FINISH_SECONDS
from cuadrilla.crew.idle_policy import IdlePolicy, OwnerRules
from cuadrilla.crew.island import follow, joined
from cuadrilla.crew.node import Node
from cuadrilla.crew.worker import once, run_worker
from cuadrilla.errors import CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.host.torchrun import find_place
from cuadrilla.link.address import Address
from cuadrilla.link.base import MAX_TEXT
from cuadrilla.link.identity import Identity
from cuadrilla.log import FILE_FORMAT, TALK, set_up_logging, to_files_only
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.printable import one_line

RESOURCE = "cuadrilla"
"""A custom resource of Ray. If machines of the cluster offer it, only these work, with one worker per unit of it."""
MAX_RESTARTS = 5
POLL_SECONDS, ANSWER_SECONDS = 1.0, 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The part of a machine that one worker uses: number `index` of Ray's node. `name`: the worker's in the crew.
    `reserves`: arguments of `ray.remote`. `threads`: number of threads to compute with.
    """

    node: str
    index: int
    name: str = field(compare=False)
    reserves: Mapping[str, Any] = field(compare=False)
    threads: int = field(compare=False)


def slots_of(nodes: Sequence[Mapping[str, Any]]) -> list[Slot]:
    """Slots of a cluster, from the rows of `ray.nodes()`: on each machine one per card, else one per machine."""
    alive = [node for node in nodes if node["Alive"]]
    offered = [node for node in alive if node["Resources"].get(RESOURCE)] or alive
    num_nodes = Counter(node["NodeManagerAddress"] for node in offered)
    found = []
    for node in offered:
        host, node_id = node["NodeManagerAddress"], node["NodeID"]
        name = "ray-" + re.sub(r"[^0-9a-z]+", "-", host.lower())
        if num_nodes[host] > 1:
            name += f"-{node_id[:4]}"
        needs, threads = _needs_of(node["Resources"])
        for index, reserves in enumerate(needs):
            numbered = f"{name}-{index + 1}" if index else name
            found.append(Slot(node=node_id, index=index, name=numbered, reserves=reserves, threads=threads))
    return found


def _needs_of(resources: Mapping[str, float]) -> tuple[list[dict[str, Any]], int]:
    """Resources that each worker of a machine reserves, and the threads of each worker."""
    cores, cards, offered = (int(resources.get(name, 0)) for name in ("CPU", "GPU", RESOURCE))
    if cards:
        needs: list[dict[str, Any]] = [{"num_gpus": 1, "num_cpus": 0}] * cards
    elif offered:
        needs = [{"num_cpus": 0, "resources": {RESOURCE: 1}}] * offered
    else:
        needs = [{"num_cpus": cores}] * min(1, cores)
    return needs, max(1, cores // max(1, len(needs)))


@contextmanager
def connected(address: str) -> Iterator[str]:
    """Be the driver of the cluster at `address` (HOST:PORT, or as `ray.init` takes it) during the block, which gets
    this machine's address in the cluster. Raises LinkError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"  # else a SIGTERM aborts this process
    to_files_only("ray")
    settings = {"log_to_driver": False, "logging_level": logging.INFO, "logging_format": FILE_FORMAT}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address not in ("", "auto"):  # Ray itself takes minutes to report that nothing listens there
            head = Address.parse(address)
            socket.create_connection((head.host, head.port), timeout=ANSWER_SECONDS).close()
        ray.init(address=address or None, include_dashboard=None if address else False, **settings)
    except (OSError, RuntimeError, TimeoutError, ValueError, ray.exceptions.RayError) as error:
        where, reason = address or "127.0.0.1", one_line(str(error), most=MAX_TEXT)
        hint = "is its head running, with this Ray and Python? is its token in ~/.ray/auth_token here?"
        raise LinkError("no Ray cluster at {address}: {reason}", address=where, reason=reason, hint=hint) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's handler saves no checkpoint
    log.info("Ray runs at %s", ray.get_runtime_context().gcs_address, extra=TALK)
    try:
        yield ray.util.get_node_ip_address()
    finally:
        ray.shutdown()


class Launcher:
    """Starts a worker in each slot of the cluster while the run lasts, also on machines that join the cluster later.

    `admit(name)` lets a worker into the crew; returns its credential. `address`: the coordinator's.
    """

    def __init__(self, *, ranks: bool, address: str, admit: Callable[[str], Identity]) -> None:
        self._address, self._admit = address, admit
        self._working: dict[Slot, tuple[Any, Any]] = {}
        """Actor of each slot, and Ray's reference to the result of its work."""
        self._ended: set[Slot] = set()
        self._failure: CuadrillaError | None = None
        self._closed = threading.Event()
        work = self._run_ranks if ranks else self._run_actors
        self._thread = threading.Thread(target=self._run, args=(work,), name="ray", daemon=True)
        self._thread.start()

    def failure(self) -> CuadrillaError | None:
        """Why no worker is left, returned once; None as long as one works or may come."""
        if self._working:
            return None
        found, self._failure = self._failure, None
        return found

    def close(self) -> None:
        """End the actors, after FINISH_SECONDS in which they may finish."""
        self._closed.set()
        self._thread.join(FINISH_SECONDS)
        working = list(self._working.values())  # a copy: the thread may still run
        if working:
            ray.wait([result for _, result in working], num_returns=len(working), timeout=FINISH_SECONDS)
        for actor, _ in working:
            ray.kill(actor)

    def _run(self, work: Callable[[], None]) -> None:
        """Body of a thread of its own: a call to a cluster head that has gone takes a minute."""
        try:
            work()
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Note `error`: a worker's, as Ray passes it on, or Ray's own."""
        cause = getattr(error, "cause", error)
        if not isinstance(cause, CuadrillaError):
            hint = "see the logs of the Ray cluster; the same command continues"
            cause = EnvironmentProblem("{reason}", reason=one_line(str(cause), most=MAX_TEXT), hint=hint)
        log.warning("Ray: %s", cause.message)
        self._failure = cause

    def _run_actors(self) -> None:
        while not self._closed.is_set():
            for slot, (_, result) in list(self._working.items()):
                if ray.wait([result], timeout=0)[0]:  # it has ended, or its machine has gone
                    self._ended.add(slot)
                    try:
                        ray.get(result)
                    except ray.exceptions.RayError as error:
                        self._failed(error)
                    del self._working[slot]
            for slot in slots_of(ray.nodes()):
                if slot not in self._working and slot not in self._ended:
                    self._start(slot)
            self._closed.wait(POLL_SECONDS)

    def _start(self, slot: Slot) -> None:
        there = NodeAffinitySchedulingStrategy(slot.node, soft=False)
        limits = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS, "scheduling_strategy": there}
        actor = ray.remote(**limits, **slot.reserves)(RayWorker).remote()
        self._working[slot] = actor, actor.work.remote(slot.name, **self._work_of(slot))
        log.info("Ray starts %s", slot.name, extra=TALK)

    def _work_of(self, slot: Slot) -> dict[str, Any]:
        """Arguments of the slot's worker, with its credential."""
        return {"address": self._address, "identity": self._admit(slot.name), "threads": slot.threads}

    def _run_ranks(self) -> None:
        """Run all slots as ranks of one Ray Train run, which is one worker of the crew. Ray restarts them together."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer

        slots = slots_of(ray.nodes())
        if not slots or any(slot.reserves != slots[0].reserves for slot in slots):
            raise RuntimeError(Message("the machines of the cluster are not alike: leave engine.ranks out"))
        reserves = slots[0].reserves
        cards, cores = reserves.get("num_gpus", 0), reserves.get("num_cpus", 0)
        resources = {"CPU": cores, "GPU": cards, **reserves.get("resources", {})}
        scaling = ScalingConfig(num_workers=len(slots), use_gpu=bool(cards), resources_per_worker=resources)
        with tempfile.TemporaryDirectory() as folder:
            trainer = TorchTrainer(
                partial(train_rank, slots[0].name, **self._work_of(slots[0])),
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=scaling,
                run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=MAX_RESTARTS)),
            )
            try:
                trainer.fit()
            except TrainingFailedError as error:
                raise RuntimeError(str(error)) from error


class RayWorker:
    """An actor. When its process dies, Ray starts another one and calls `work` there again."""

    def work(self, name: str, *, address: str, identity: Identity, threads: int) -> None:
        """Work until the run of the coordinator at `address` ends. Raises CuadrillaError."""
        set_up_logging(None)  # stderr, which Ray keeps
        run_worker(_node(name, address, identity), Use(name="", device="", threads=threads))


def train_rank(name: str, *, address: str, identity: Identity, threads: int) -> None:
    """Work as a rank of a Ray Train run, whose ranks are one worker of the crew. Raises CuadrillaError."""
    set_up_logging(None)
    place, node, use = find_place(), _node(name, address, identity), Use(name="", device="", threads=threads)
    if place is None:
        run_worker(node, use)
        return
    _meet_anew()
    with joined(place) as island:
        if place.leads:
            run_worker(node, use, island=island)
            return
        follow(island, once(node, node.found_run), threads=threads)


def _meet_anew() -> None:
    """Leave Ray Train's process group, since an island forms its own. Rank 0 sends the others a port for that."""
    with socket.create_server(("", 0)) as listener:
        port = torch.tensor([listener.getsockname()[1]])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(port))


def _node(name: str, address: str, identity: Identity) -> Node:
    home = Home.of_user()
    crew = Joined(folder=home.path, address=address, name=name)
    policy = IdlePolicy(OwnerRules(), home=home)
    return Node(home=home, crew=crew, identity=identity, approved=True, tell=log.info, idle_policy=policy)
