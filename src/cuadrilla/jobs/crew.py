"""Jobs on the machines of a crew: each worker that has joined is a place, one job after the other.

A machine gets a job's run file, what it needs by hash, and what another machine has left of it: rows and the newest
checkpoint. It sends rows and checkpoints back as they come, so that nothing but the work since the last checkpoint is
lost with it.

Invariants
* Rows, files and the end of a job are taken from the machine that has it, while it has it; a checkpoint counts when it
  agrees with its manifest and its numbers are finite. The one that a machine began with stays.
* A machine that has gone, or is silent for `SILENT_SECONDS`, is no failure of its job, unless that happens again and
  again: another machine goes on. Nor is the failure of one machine. One on which several jobs in a row end badly gets
  none until it joins again, so that it does not use up all jobs.
"""

import logging
import os
import queue
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.crew.port import OpenCrew
from cuadrilla.errors import CheckpointError
from cuadrilla.home import Home
from cuadrilla.jobs.assigned import AssignedJob, assign, newest_version
from cuadrilla.jobs.executor import Ended
from cuadrilla.jobs.queue import DEVICES
from cuadrilla.link.address import Address
from cuadrilla.link.base import JOB_NAME, PAUSED, Goodbye, Hello, NodeReport, Progress, Stop, ToCoordinator, node_of
from cuadrilla.link.jobs import COMPLETE, DEVICE, FAILED, JobNews, Keep, Recall
from cuadrilla.link.server import CrewServer
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.rundir import (
    RunDir,
    append_event,
    append_lines,
    make_private,
    open_private,
    storage_errors,
    write_json,
)
from cuadrilla.train.checkpoint import (
    best_version,
    prune_checkpoints,
    verify_checkpoint,
)
from cuadrilla.train.nodelog import NodeLogs

SILENT_SECONDS = 10.0
SAVE_SECONDS = 60.0
"""A job that is to be saved, as its machine is wanted for something else, has so long."""
MAX_FAILURES, MAX_LOSSES = 2, 10
"""Of a job, on machines that got no further with it: then it counts as failed."""
PATIENT_WITH = 3
"""Jobs in a row that end badly on a machine: then it gets no more."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Place:
    """A worker that has joined. `bad`: jobs in a row that have ended badly there."""

    name: str
    heard_at: float
    device: str
    bad: int = 0


class CrewExecutor:
    """The machines of this machine's crew, which join to do jobs, until it is closed. Used by one thread; a `Receiver`
    and a `JobReceiver` for those of the link."""

    def __init__(self, home: Home, *, listen: Address, folder: Path) -> None:
        """`folder`: of what the jobs belong to, a run directory as far as it has machines. Raises LinkError."""
        self._home = home
        self._run = RunDir(folder)
        self._logs = NodeLogs(self._run.nodes)
        self._heard: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._present: dict[str, _Place] = {}
        self._assigned: dict[str, AssignedJob] = {}
        self._ended: list[Ended] = []
        self._failures: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._paused: frozenset[str] = frozenset()
        self._server = CrewServer(home.crew, receiver=self, jobs=self, term=home.term)
        self.crew = OpenCrew(server=self._server, listen=listen, home=home)

    # -- Executor ------------------------------------------------------------------------------------------------------

    @property
    def places(self) -> dict[str, str]:
        return {name: self._present[name].device for name in sorted(self._present)}

    @property
    def free(self) -> list[str]:
        """Of a machine that is paused, none."""
        able = [name for name in self.places if self._present[name].bad < PATIENT_WITH]
        return [name for name in able if name not in self._assigned and node_of(name) not in self._paused]

    @property
    def busy(self) -> dict[str, str]:
        return {name: assigned.job for name, assigned in self._assigned.items()}

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        """Raises as `assign`."""
        assert JOB_NAME.fullmatch(job), job
        self._assigned[place], order = assign(job, run, machine=place)
        self._server.send(place, order)

    def poll(self) -> list[Ended]:
        """Jobs that have ended since. Raises LinkError, ResourceError."""
        while not self._heard.empty():
            self._heard.get()()
        now = time.monotonic()
        self.crew.poll()
        self._paused = self._home.paused_nodes
        self._server.pause(self._paused - self._saving(now=now))
        for place in list(self._present.values()):
            if now - place.heard_at > SILENT_SECONDS:
                reason = Message("nothing heard for {seconds:g} s", seconds=SILENT_SECONDS)
                self._server.send(place.name, Stop(reason=reason, again=True))
                self._gone(place.name, reason)
        ended, self._ended = self._ended, []
        return ended

    def _saving(self, *, now: float) -> set[str]:
        """Those of the paused nodes that have something to save, and time left for it; they are told to."""
        saving = set()
        for worker, assigned in self._assigned.items():
            if node_of(worker) in self._paused:
                if assigned.preempted_at is None:
                    self.preempt(assigned.job)
                if now - (assigned.preempted_at or now) < SAVE_SECONDS:
                    saving.add(node_of(worker))
        return saving

    def preempt(self, job: str) -> None:
        for name, assigned in self._assigned.items():
            if assigned.job == job:
                assigned.preempted_at = time.monotonic()
                self._server.send(name, Recall(job=job))

    def close(self) -> None:
        for worker, assigned in list(self._assigned.items()):
            self._end(worker, assigned)
        self._server.close()

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

    def keep(self, worker: str, file: Keep, chunks: Iterator[memoryview]) -> None:
        """Raises LinkError, ResourceError."""
        assigned = self._assigned.get(worker)
        job, _, path = file.name.partition("/")
        if assigned is None or assigned.job != job:  # not any more
            deque(chunks, maxlen=0)
            return
        target = assigned.place_for(path)
        make_private(target.parent)
        with storage_errors(target), open(target, "wb", opener=open_private) as sent:
            sent.writelines(chunks)
            sent.flush()
            os.fsync(sent.fileno())

    def file(self, sha256: str) -> Path | None:
        found = [assigned.files[sha256] for assigned in list(self._assigned.values()) if sha256 in assigned.files]
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
        assigned = self._assigned.get(worker)
        if assigned is None:
            return
        log.info("%s is gone (%s): another machine goes on with %s", worker, reason, assigned.job, extra=TALK)
        lost = reason != PAUSED and self._is_over(self._losses, assigned.job, most=MAX_LOSSES)
        told = Message("{number} machines were lost during this job", number=MAX_LOSSES) if lost else ""
        self._end(worker, assigned, reason=told)

    def _is_over(self, counter: Counter[str], job: str, *, most: int) -> bool:
        """Whether it has happened to a job so often that it counts as failed."""
        counter[job] += 1
        if counter[job] < most:
            return False
        del counter[job]
        return True

    def _take(self, worker: str, news: JobNews) -> None:
        """Raises ResourceError."""
        assigned = self._assigned.get(worker)
        if assigned is None or assigned.job != news.job:
            return
        if news.rows:
            append_lines(assigned.run.metrics, news.rows)
            write_json(assigned.run.status, {"state": "running", "version": news.version}, private=True)
        if news.kept:
            self._adopt(worker, news.kept, assigned)
        if news.ended == COMPLETE:
            self._got_further(worker, assigned)
            self._end(worker, assigned, complete=True)
        elif news.ended == FAILED:
            self._failed(worker, assigned, reason=news.reason or Message("it says not why"))
        elif news.ended:
            if news.reason:  # why it could not even begin
                log.warning("%s gives %s back: %s", worker, assigned.job, news.reason)
                self._ended_badly(worker)
            self._end(worker, assigned)

    def _adopt(self, worker: str, version: int, assigned: AssignedJob) -> None:
        """A checkpoint that has come as a whole becomes one of the run."""
        name = f"v{version:08d}"
        arrived, target = assigned.incoming / name, assigned.run.checkpoints / name
        if not arrived.exists():
            return
        try:
            verify_checkpoint(arrived)
        except CheckpointError as error:
            log.warning("a checkpoint from %s cannot be used: %s", worker, error.message)
            shutil.rmtree(arrived, ignore_errors=True)
            return
        newest = newest_version(assigned.run)
        with storage_errors(target):
            make_private(assigned.run.checkpoints)
            if target.exists():
                shutil.rmtree(target)
            arrived.rename(target)
        protect = assigned.keep_steps | {best_version(assigned.run, upto=newest_version(assigned.run))}
        prune_checkpoints(assigned.run.checkpoints, keep=assigned.keep, protect=protect)
        if version > newest:
            self._got_further(worker, assigned)

    def _got_further(self, worker: str, assigned: AssignedJob) -> None:
        for counter in (self._failures, self._losses):
            counter.pop(assigned.job, None)
        self._present[worker].bad = 0

    def _failed(self, worker: str, assigned: AssignedJob, *, reason: str) -> None:
        """Its word is not enough: another machine tries."""
        self._ended_badly(worker)
        is_over = self._is_over(self._failures, assigned.job, most=MAX_FAILURES)
        if not is_over:
            log.warning("%s has failed at %s, which is tried again: %s", worker, assigned.job, reason)
        self._end(worker, assigned, reason=reason if is_over else "")

    def _ended_badly(self, worker: str) -> None:
        self._present[worker].bad += 1
        if self._present[worker].bad == PATIENT_WITH:
            log.warning("one job after the other ends badly on %s: it gets none until it joins again", worker)

    def _end(self, worker: str, assigned: AssignedJob, *, complete: bool = False, reason: str = "") -> None:
        del self._assigned[worker]
        state = "complete" if complete else "failed" if reason else "stopped"
        write_json(assigned.run.status, {"state": state, "version": newest_version(assigned.run)}, private=True)
        shutil.rmtree(assigned.incoming, ignore_errors=True)
        assigned.lock.__exit__()
        seconds = time.monotonic() - assigned.began
        self._ended.append(Ended(job=assigned.job, place=worker, complete=complete, seconds=seconds, reason=reason))
