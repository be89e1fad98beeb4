"""The crew engine: this process coordinates; workers are processes that dial in, here or on other machines.

Worker processes of this machine are children that get their own keys, in a private temporary folder, and end when
this process ends: their standard input is a pipe from here. A child that dies is reported by its connection at once;
the others go on. Without any worker the coordinator waits, unless all the workers it could have were its children.
"""

import itertools
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cuadrilla.config import CrewEngine
from cuadrilla.engines.doors import NO_LISTENER, Doors, LinkDoor, RayDoor, RayUse, open_doors
from cuadrilla.engines.ray.cluster import RunCluster, cluster_of
from cuadrilla.errors import CuadrillaError, EnvironmentProblem
from cuadrilla.home import Home
from cuadrilla.host.memory import num_killed_for_memory
from cuadrilla.link.tls import key_hash, node_request, save_node
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, private_folder, storage_errors
from cuadrilla.train.coordinate import Outcome
from cuadrilla.train.runtime import Runtime
from cuadrilla.train.setup import Parts

FINISH_SECONDS, END_SECONDS = 10.0, 5.0
"""A child that has been told to stop finishes its pass first; then it is cut off, then killed."""

KILLED_FOR_MEMORY = (
    "{reason}, and the kernel has killed for want of memory: a smaller model, smaller units, or more memory for it"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Door:
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
    parent holds it.
    """

    home: Home | None = None
    opened: Callable[[Door], None] | None = None
    moved: Callable[[str], None] | None = None
    standbys: frozenset[str] = frozenset()
    ray_nodes: frozenset[str] = frozenset()
    cluster: RunCluster | None = None
    listener: int = NO_LISTENER


def run_crew(parts: Parts, run: RunDir, *, opening: Opening) -> Outcome:
    """Train with a crew to the end, or to the stop that was asked for. Raises whatever made the run fail."""
    before = torch.get_num_threads()
    if parts.config.sync.strict:
        torch.set_num_threads(parts.config.train.threads or 1)
    try:
        with private_folder() as private, ExitStack() as stack:
            if opening.cluster is None:
                opening = replace(opening, cluster=stack.enter_context(_cluster(parts, run, opening=opening)))
            return _run(parts, run, opening=opening, private=private)
    finally:
        parts.store.close()
        torch.set_num_threads(before)


def _cluster(parts: Parts, run: RunDir, *, opening: Opening) -> AbstractContextManager[RunCluster | None]:
    return cluster_of(parts.config.engine, run, practice=opening.home is None, nodes=opening.ray_nodes)


def _run(parts: Parts, run: RunDir, *, opening: Opening, private: Path) -> Outcome:
    engine, home = parts.config.engine, opening.home
    assert isinstance(engine, CrewEngine)
    names = [f"{'here' if home else 'worker'}-{index + 1}" for index in range(len(engine.workers))]
    places = dict(zip(names, engine.workers, strict=True))
    place = partial(_place_in_ray, places, engine=engine, run=run)
    ray = RayUse(cluster=opening.cluster, nodes=opening.ray_nodes, opened=place)
    runtime = Runtime(parts.coordination)
    children = _Children(engine=engine, run=run, event=parts.store.event)
    try:
        with open_doors(
            parts,
            runtime,
            run,
            home=home,
            private=private,
            ray=ray,
            standbys=opening.standbys,
            listener=opening.listener,
        ) as doors:
            if doors.ray is None and doors.link is not None:
                for name, speed in places.items():
                    _let_in(name, private / name, door=doors.link)
                    children.start(name, address=doors.link.desk.direct_address, identity=private / name, speed=speed)
            if opening.opened is not None:
                opening.opened(_describe(doors, children))
            return _coordinate(parts, runtime, doors, children, opening=opening)
    finally:
        children.end()


def _place_in_ray(places: Mapping[str, float], door: RayDoor, *, engine: CrewEngine, run: RunDir) -> None:
    """Workers on this machine, where the run directory is, as actors."""
    from cuadrilla.engines.ray.worker import Place

    if not door.cluster.ours:  # it has its own machines: they are found as they offer themselves
        return
    threads = 1 if len(places) > 1 else 0
    for name, speed in places.items():
        place = Place(
            name=name, speed=speed, link=engine.link, threads=threads, folder=str(run.path), node=door.cluster.node
        )
        door.desk.place(place)


def _describe(doors: Doors, children: "_Children") -> Door:
    pids = children.pids() if doors.ray is None else doors.ray.desk.pids()
    if doors.link is None:
        return Door(address="", key_hash=b"", pids=pids)
    return Door(address=doors.link.address, key_hash=key_hash(doors.link.keys.identity.certificate), pids=pids)


def _let_in(name: str, folder: Path, *, door: LinkDoor) -> None:
    """Keys for a worker process of this machine, for as long as this run; those of an earlier run are forgotten."""
    if name in door.nodes.nodes():
        door.nodes.remove(name)
    _, certificate = door.keys.sign(node_request(folder, name=name))
    ca, server = door.keys.identity.ca, door.keys.identity.certificate
    save_node(folder, certificate=certificate, ca=ca, server=server)
    door.nodes.add(name, certificate=certificate)


def _coordinate(parts: Parts, runtime: Runtime, doors: Doors, children: "_Children", *, opening: Opening) -> Outcome:
    home = opening.home

    def look() -> None:
        doors.look(home=home)
        if (address := doors.follow()) and opening.moved is not None:
            opening.moved(address)
        children.look()
        if home is None and not children.alive and not (doors.ray and doors.ray.desk.may_have_workers()):
            parts.coordination.fail(doors.ray.desk.failure() if doors.ray else children.failure())

    return runtime.serve(look)


class _Children:
    """The worker processes of this machine."""

    def __init__(self, *, engine: CrewEngine, run: RunDir, event: Callable[..., None]) -> None:
        self._engine = engine
        self._run = run
        self._event = event
        self._killed_for_memory = num_killed_for_memory()
        self.alive: dict[str, subprocess.Popen[str]] = {}
        self._last_words: dict[str, str] = {}

    def start(self, name: str, *, address: str, identity: Path, speed: float) -> None:
        """Secrets are in the identity's folder, never among the arguments."""
        arguments = {
            "--address": address,
            "--identity": str(identity),
            "--folder": str(self._run.path),
            "--name": name,
            "--speed": str(speed),
            "--link": self._engine.link,
            "--threads": "1" if len(self._engine.workers) > 1 else "0",
        }
        command = [sys.executable, "-m", "cuadrilla", "--json", "work", *itertools.chain(*arguments.items())]
        with storage_errors(self._run.logs), open(self._run.logs / f"{name}.txt", "ab") as talk:
            self.alive[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=talk, text=True
            )

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.alive.items()}

    def look(self) -> None:
        """Notice who has died, and what it said last."""
        ended = {name: process for name, process in self.alive.items() if process.poll() is not None}
        killed = [name for name, process in ended.items() if process.returncode == -signal.SIGKILL]
        short = bool(killed) and self._memory_ran_out()
        for name, process in ended.items():
            del self.alive[name]
            assert process.stdin is not None
            process.stdin.close()
            assert process.stdout is not None
            said = process.stdout.read()
            process.stdout.close()
            self._last_words[name] = said
            if process.returncode:
                reason = _reason(said, process.returncode)
                if short and name in killed:
                    reason = Message(KILLED_FOR_MEMORY, reason=reason)
                log.warning("%s died: %s", name, reason)
                self._event("died", worker=name, reason=reason)

    def _memory_ran_out(self) -> bool:
        """A process that the kernel kills for memory ends like any other that is killed; only a counter tells."""
        before, self._killed_for_memory = self._killed_for_memory, num_killed_for_memory()
        return self._killed_for_memory != before

    def failure(self) -> CuadrillaError:
        """Why there is no worker left: the error of the last one that could still say it."""
        for said in reversed(self._last_words.values()):
            if words := _parse(said):
                error = CuadrillaError(words["error"], hint=words.get("hint", ""))
                error.exit_code = int(words["exit_code"])
                return error
        return EnvironmentProblem("all worker processes were killed", hint="run the same command again: it goes on")

    def end(self) -> None:
        """Let them finish; whoever does not is killed."""
        for patience, act in ((FINISH_SECONDS, _cut_off), (END_SECONDS, subprocess.Popen.kill)):
            deadline = time.monotonic() + patience
            for process in self.alive.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, deadline - time.monotonic()))
            for process in self.alive.values():
                if process.poll() is None:
                    act(process)
        for process in self.alive.values():
            _cut_off(process)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.alive.clear()


def _cut_off(process: "subprocess.Popen[str]") -> None:
    """A worker process ends when its standard input does."""
    assert process.stdin is not None
    process.stdin.close()


def _parse(said: str) -> Mapping[str, str] | None:
    try:
        words = json.loads(said)
    except ValueError:
        return None
    return words if isinstance(words, dict) and "error" in words else None


def _reason(said: str, returncode: int) -> Message:
    words = _parse(said)
    if words:
        return Message("{error} (exit code {code})", error=words["error"], code=returncode)
    if returncode < 0:
        return Message("signal {number} ({name})", number=-returncode, name=str(signal.strsignal(-returncode)))
    return Message("exit code {code}", code=returncode)
