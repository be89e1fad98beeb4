"""Where jobs are done by the machines of a crew: each worker that has joined is a place, one job after the other.

A machine gets a job's run file, what it needs by hash, and what another machine has left of it: rows and the newest
checkpoint. It sends rows and checkpoints back as they come, so that nothing but the work since the last checkpoint is
lost with it. A job may also be the call of a function, of which nothing comes back but the result.

Invariants
* Who does a job decides: rows, files and the end of a job are taken from nobody else, and only while it has it; what
  they must be for that is in `given.py`. What a machine has begun with stays until another one has gone on from what it
  has sent.
* A machine that has gone, or is silent for `SILENT_SECONDS`, is no failure of its job, unless that happens again and
  again: another machine goes on. Nor is the failure of one machine (`standing.py`).
"""

import json
import logging
import queue
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic

from cuadrilla.engines.crew import Lender, OpenCrew
from cuadrilla.engines.crew_address import CrewAddress
from cuadrilla.errors import CheckpointError
from cuadrilla.home import Home
from cuadrilla.jobs.deal import DEVICES
from cuadrilla.jobs.given import Given, give, newest_version, not_wanted, require_fit
from cuadrilla.jobs.origin import forget_set_aside, left_by, note_origin, set_aside_of
from cuadrilla.jobs.places import J, Left
from cuadrilla.jobs.standing import MAX_LOSSES, FailureMeans, Standing
from cuadrilla.link.address import Address
from cuadrilla.link.base import PAUSED, Goodbye, Hello, NodeReport, Progress, Stop, ToCoordinator
from cuadrilla.link.gate import bind
from cuadrilla.link.grpc_server import CrewServer
from cuadrilla.link.jobs import (
    COMPLETE,
    DEVICE,
    FAILED,
    JobNews,
    JobServer,
    Recall,
    Row,
)
from cuadrilla.link.names import JOB_NAME, node_of
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.offer import Offer
from cuadrilla.link.tls import key_hash, open_coordinator
from cuadrilla.link.wire import Layout
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.rundir import (
    RunDir,
    append_event,
    make_private,
    open_private,
    storage_errors,
    write_json,
)
from cuadrilla.train.checkpoint import (
    best_of,
    list_checkpoints,
    prune_checkpoints,
    verify_checkpoint,
)
from cuadrilla.train.nodelog import NodeLogs

SILENT_SECONDS = 10.0
SAVE_SECONDS = 60.0
"""A job that is to be saved, as its machine is wanted for something else, has so long."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Place:
    """A worker that has joined."""

    name: str
    heard_at: float
    device: str


class CrewPlaces(Generic[J]):
    """The machines of this machine's crew, for as long as `server` runs. Used by one thread; a `Receiver` and a
    `JobReceiver` for those of the link."""

    def __init__(self, *, home: Home, folder: Path) -> None:
        """`folder`: of what the jobs belong to, a run directory as far as it has machines."""
        self._home = home
        self._run = RunDir(folder)
        self._logs = NodeLogs(self._run.nodes)
        self.server: JobServer | None = None
        self.lender: Lender | None = None
        """Where machines can be lent."""
        self.reached: CrewAddress | None = None
        """Over the crew link; `moved` is called with an address that came later."""
        self.moved: Callable[[str], None] | None = None
        self._heard: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._present: dict[str, _Place] = {}
        self._given: dict[str, Given[J]] = {}
        self._left: list[Left[J]] = []
        self._standing = Standing()
        self._paused: frozenset[str] = frozenset()

    # -- Doing ---------------------------------------------------------------------------------------------------------

    @property
    def places(self) -> Sequence[str]:
        return sorted(self._present)

    @property
    def free(self) -> list[str]:
        """A machine on which one job after the other ends badly rests, one that is paused saves what it has first."""
        now = time.monotonic()
        able = [name for name in self.places if not self._standing.rest_seconds(name, now=now)]
        return [name for name in able if name not in self._given and node_of(name) not in self._paused]

    @property
    def busy(self) -> dict[str, J]:
        return {name: given.job for name, given in self._given.items()}

    def device(self, place: str) -> str:
        """Of which kind it is, as it says; "" if it does not."""
        return self._present[place].device

    def start(self, job: J, run: RunDir, *, name: str) -> None:
        """Raises as `give`."""
        assert self.server is not None
        assert JOB_NAME.fullmatch(job.name), job.name
        self._given[name], order = give(job, run, machine=name)
        self.server.order(name, order)

    def look(self) -> list[Left[J]]:
        """Who has ended since. Raises LinkError, ResourceError."""
        assert self.server is not None
        while not self._heard.empty():
            self._heard.get()()
        now = time.monotonic()
        address = self.reached.follow() if self.reached is not None else None
        if address is not None and self.moved is not None:
            self.moved(str(address))
        self.server.end_kicked()
        self.server.adopt_invites(self._home.take_invites())
        self._paused = self._home.paused_nodes
        self.server.pause(self._paused - self._saving(now=now))
        for place in list(self._present.values()):
            if now - place.heard_at > SILENT_SECONDS:
                reason = Message("nothing heard for {seconds:g} s", seconds=SILENT_SECONDS)
                self.server.send(place.name, Stop(reason=reason, again=True))
                self._gone(place.name, reason)
        left, self._left = self._left, []
        return left

    def _saving(self, *, now: float) -> set[str]:
        """Those of the paused nodes that have something to save, and time left for it; they are told to."""
        saving = set()
        for worker, given in self._given.items():
            if node_of(worker) in self._paused:
                if given.recalled_at is None:
                    self.recall(given.job)
                if now - (given.recalled_at or now) < SAVE_SECONDS:
                    saving.add(node_of(worker))
        return saving

    def recall(self, job: J) -> None:
        """Have it saved and given back; `look` tells of it. Nothing, where nobody has it."""
        assert self.server is not None
        for name, given in self._given.items():
            if given.job.name == job.name:
                given.recalled_at = time.monotonic()
                self.server.order(name, Recall(job=job.name))

    def stop(self) -> None:
        """Have all save and give back; `look` tells of them."""
        for given in self._given.values():
            self.recall(given.job)

    def close(self) -> None:
        for worker, given in list(self._given.items()):
            self._end(worker, given)
        if self.server is not None:
            self.server.close()
            self.server = self.lender = None

    # -- from the threads of the link ----------------------------------------------------------------------------------

    def deliver(self, worker: str, message: ToCoordinator) -> None:
        if isinstance(message, Hello):
            device = str(message.environment.get(DEVICE, ""))
            self._heard.put(lambda: self._join(worker, device=device if device in DEVICES else ""))
        elif isinstance(message, Goodbye):
            self._heard.put(lambda: self._gone(worker, message.reason))

    def heard(self, worker: str, _progress: Progress) -> None:
        self._alive(worker)

    def _alive(self, worker: str) -> None:
        place = self._present.get(worker)
        if place is not None:
            place.heard_at = time.monotonic()

    def reported(self, worker: str, report: NodeReport) -> None:
        self._logs.report(worker, report)

    def left(self, worker: str, reason: str) -> None:
        self._heard.put(lambda: self._gone(worker, reason))

    def news(self, worker: str, news: JobNews) -> None:
        self._alive(worker)
        self._heard.put(lambda: self._take(worker, news))

    def place_for(self, worker: str, name: str, *, num_bytes: int) -> Path:
        """Raises LinkError."""
        given = self._given.get(worker)
        job, _, path = name.partition("/")
        if given is None or given.job.name != job:
            raise not_wanted()
        return given.place_for(path, num_bytes=num_bytes)

    def goes_on(self, worker: str, place: Path) -> None:
        """Raises LinkError."""
        given = self._given.get(worker)
        if given is None or given.incoming not in place.parents:
            raise not_wanted()
        self._alive(worker)

    def file(self, sha256: str) -> Path | None:
        found = [given.files[sha256] for given in list(self._given.values()) if sha256 in given.files]
        return found[0] if found else None

    # -- one thing after the other -------------------------------------------------------------------------------------

    def _join(self, worker: str, *, device: str) -> None:
        self._gone(worker, Message("it has joined anew"))
        self._present[worker] = _Place(name=worker, heard_at=time.monotonic(), device=device)
        append_event(self._run.events, "joined", worker=worker)

    def _gone(self, worker: str, reason: str) -> None:
        if self._present.pop(worker, None) is None:
            return
        append_event(self._run.events, "left", worker=worker, reason=reason)
        given = self._given.get(worker)
        if given is None:
            return
        log.info("%s is gone (%s): another machine goes on with %s", worker, reason, given.job.name, extra=TALK)
        now = time.monotonic()
        lost = reason != PAUSED and self._standing.lost(given.job.name, worker=worker, now=now)
        self._tell_of_rest(worker, now=now)
        told = Message("{number} machines were lost during this job", number=MAX_LOSSES) if lost else ""
        self._end(worker, given, reason=told)

    def _take(self, worker: str, news: JobNews) -> None:
        """Raises ResourceError."""
        given = self._given.get(worker)
        if given is None or given.job.name != news.job:
            return
        rows = [row for row in news.rows if row["version"] <= given.steps and not given.is_call]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        given.row_bytes += len(text)
        if given.row_bytes > given.most_row_bytes:
            self._send_away(worker, Message("it sends far more than its work needs"))
            return
        if rows:
            _append(given.run.metrics, text)
            write_json(given.run.status, {"state": "running", "version": rows[-1]["version"]}, private=True)
        if news.kept and not given.is_call:
            self._adopt(worker, news.kept, given)
        if news.ended == COMPLETE and not (missing := given.missing(news)):
            self._standing.got_further(given.job.name, worker=worker)
            forget_set_aside(given.run)
            self._end(worker, given, complete=True, figures=news.figures)
        elif news.ended == COMPLETE:
            self._failed(worker, given, reason=missing)
        elif news.ended == FAILED:
            self._failed(worker, given, reason=news.reason or Message("it says not why"))
        elif news.ended:
            self._given_back(worker, given, reason=news.reason)

    def _send_away(self, worker: str, reason: str) -> None:
        assert self.server is not None
        log.warning("%s: %s", worker, reason)
        self.server.send(worker, Stop(reason=reason, refused=True))
        self._gone(worker, reason)

    def _adopt(self, worker: str, version: int, given: Given[J]) -> None:
        """A checkpoint that has come as a whole becomes one of the run."""
        name = f"v{version:08d}"
        arrived, target = given.incoming / name, given.run.checkpoints / name
        given.has_come(name)
        if not arrived.exists():
            return
        try:
            verify_checkpoint(arrived)
            require_fit(arrived, version=version, shapes=given.shapes)
        except CheckpointError as error:
            log.warning("a checkpoint from %s cannot be used: %s", worker, error.message)
            shutil.rmtree(arrived, ignore_errors=True)
            return
        newest = newest_version(given.run)
        with storage_errors(target):
            make_private(given.run.checkpoints)
            if target.exists():
                shutil.rmtree(target)
            arrived.rename(target)
        note_origin(given.run, version=version, worker=worker)
        best = best_of(list_checkpoints(given.run.checkpoints)[-1])
        protect = given.keep_steps | ({best[1]} if best is not None else set())
        prune_checkpoints(given.run.checkpoints, keep=given.keep, protect=protect)
        if version > newest:
            self._standing.got_further(given.job.name, worker=worker)

    def _failed(self, worker: str, given: Given[J], *, reason: str) -> None:
        """That it says so is not enough."""
        name, source, now = given.job.name, left_by(given.run), time.monotonic()
        verdict = self._standing.failed(name, worker=worker, left_by=source, now=now)
        if verdict is not FailureMeans.FAILED:
            log.warning("%s has failed at %s, which is tried again: %s", worker, name, reason)
        if verdict is FailureMeans.SET_ASIDE and source is not None:
            log.warning("%s: nobody can go on from what %s has left of it", name, source or Message("this machine"))
            set_aside_of(given.run, source)
        self._tell_of_rest(worker, now=now)
        self._end(worker, given, reason=reason if verdict is FailureMeans.FAILED else "")

    def _given_back(self, worker: str, given: Given[J], *, reason: str) -> None:
        """`reason`: why it could not even begin."""
        if reason:
            now = time.monotonic()
            log.warning("%s gives %s back: %s", worker, given.job.name, reason)
            self._standing.ended_badly(worker, now=now)
            self._tell_of_rest(worker, now=now)
        self._end(worker, given)

    def _tell_of_rest(self, worker: str, *, now: float) -> None:
        if seconds := self._standing.rest_seconds(worker, now=now):
            log.warning("one job after the other ends badly on %s: it gets none for %.0f s", worker, seconds)

    def _end(
        self, worker: str, given: Given[J], *, complete: bool = False, reason: str = "", figures: Row | None = None
    ) -> None:
        del self._given[worker]
        if given.is_call:
            given.keep_talk()
        else:
            state = "complete" if complete else "failed" if reason else "stopped"
            write_json(given.run.status, {"state": state, "version": newest_version(given.run)}, private=True)
        shutil.rmtree(given.incoming, ignore_errors=True)
        given.lock.__exit__()
        seconds = time.monotonic() - given.began
        self._left.append(
            Left(job=given.job, place=worker, complete=complete, seconds=seconds, reason=reason, figures=figures or {})
        )


@contextmanager
def open_crew_places(
    home: Home, *, listen: Address, folder: Path, moved: Callable[[str], None] | None = None
) -> "Iterator[tuple[CrewPlaces[Any], OpenCrew]]":
    """This machine's crew, for machines that join to do jobs; closed behind the block. `folder`: what happens there is
    written down. `moved` is called with an address that came later. Raises LinkError.
    """
    keys, nodes = open_coordinator(home.crew, now=datetime.now(UTC)), AllowList(home.nodes)
    places: CrewPlaces[Any] = CrewPlaces(home=home, folder=folder)
    nothing = Layout(())
    server = CrewServer(
        keys=keys,
        nodes=nodes,
        receiver=places,
        offer=Offer(config="", files={}),
        parameters=nothing,
        contribution=nothing,
        jobs=places,
        term=home.term,
    )
    places.server, places.lender = server, Lender(server=server, keys=keys, listed=nodes)
    try:
        port = server.serve(bind(str(listen)))
        places.reached, places.moved = CrewAddress(server, Address(listen.host, port)), moved
        address = str(places.reached.address)
        yield places, OpenCrew(address=address, key_hash=key_hash(keys.identity.certificate), pids={})
    finally:
        places.close()


def _append(path: Path, text: str) -> None:
    with storage_errors(path), open(path, "a", encoding="utf-8", opener=open_private) as file:
        file.write(text)
