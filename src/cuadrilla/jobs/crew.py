"""Jobs on the machines of a crew: each worker that has joined is a place, one job after the other.

A machine gets a job's run file, what it needs by hash, and what another machine has left of it: rows and the newest
checkpoint. It sends rows and checkpoints back as they come, so that nothing but the work since the last checkpoint is
lost with it.

Invariants
* Rows, files and the end of a job are taken from the machine that has it, while it has it; a checkpoint counts when it
  agrees with its manifest and its numbers are finite. The one that a machine began with stays.
* A machine that has gone, or is silent for `SILENT_SECONDS`, has lost its job.
"""

import logging
import os
import queue
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cuadrilla.errors import CheckpointError
from cuadrilla.home import Home
from cuadrilla.jobs.assigned import AssignedJob, assign, newest_version
from cuadrilla.jobs.executor import Ended
from cuadrilla.jobs.queue import DEVICES
from cuadrilla.link import jobs
from cuadrilla.link.address import Address
from cuadrilla.link.base import PAUSED, Goodbye, Hello, NodeReport, Progress, Stop, ToCoordinator, node_of
from cuadrilla.link.jobs import DEVICE, JobNews, Keep, Recall
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

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Machine:
    """A worker that has joined."""

    device: str
    heard_at: float = field(default_factory=time.monotonic)
    assigned: AssignedJob | None = None


class CrewExecutor:
    """The machines of this machine's crew, which join to do jobs, until it is closed. Used by one thread; a `Receiver`
    and a `JobReceiver` for those of the link."""

    def __init__(self, home: Home, *, listen: Address, folder: Path) -> None:
        """`folder`: of what the jobs belong to, a run directory as far as it has machines. Raises LinkError."""
        self._home = home
        self._run = RunDir(folder)
        self._logs = NodeLogs(self._run.nodes)
        self._heard: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._machines: dict[str, _Machine] = {}
        self._ended: list[Ended] = []
        self._paused: frozenset[str] = frozenset()
        self.crew = CrewServer(home.crew, receiver=self, jobs=self, term=home.term, home=home)
        self.crew.open(listen)

    # -- Executor ------------------------------------------------------------------------------------------------------

    @property
    def places(self) -> dict[str, str]:
        return {name: self._machines[name].device for name in sorted(self._machines)}

    @property
    def free(self) -> list[str]:
        """Devices without a job; of a machine that is paused, none."""
        return [name for name in self.places if name not in self.busy and node_of(name) not in self._paused]

    @property
    def busy(self) -> dict[str, str]:
        return {name: assigned.job for name, assigned in self._assigned().items()}

    def _assigned(self) -> dict[str, AssignedJob]:
        return {name: each.assigned for name, each in list(self._machines.items()) if each.assigned is not None}

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        """Raises as `assign`."""
        self._machines[place].assigned, order = assign(job, run, machine=place)
        self.crew.send(place, order)

    def poll(self) -> list[Ended]:
        """Jobs that have ended since. Raises LinkError, ResourceError."""
        while not self._heard.empty():
            self._heard.get()()
        self.crew.poll()
        self._paused = self._home.paused_nodes
        saving = {name: job for name, job in self.busy.items() if node_of(name) in self._paused}
        for job in saving.values():
            self.preempt(job)
        self.crew.pause(self._paused - {node_of(name) for name in saving})
        for name, machine in list(self._machines.items()):
            if time.monotonic() - machine.heard_at > SILENT_SECONDS:
                reason = Message("nothing heard for {seconds:g} s", seconds=SILENT_SECONDS)
                self.crew.send(name, Stop(reason=reason, again=True))
                self._gone(name, reason)
        ended, self._ended = self._ended, []
        return ended

    def preempt(self, job: str) -> None:
        for name, assigned in self._assigned().items():
            if assigned.job == job and not assigned.preempted:
                assigned.preempted = True
                self.crew.send(name, Recall(job=job))

    def close(self) -> None:
        for worker in self._assigned():
            self._end(worker)
        self.crew.close()

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
        machine = self._machines.get(worker)
        if machine is not None:
            machine.heard_at = time.monotonic()

    def reported(self, worker: str, report: NodeReport) -> None:
        self._logs.report(worker, report)

    def left(self, worker: str, reason: str) -> None:
        self._heard.put(lambda: self._gone(worker, reason))

    def news(self, worker: str, news: JobNews) -> None:
        self._alive(worker)
        self._heard.put(lambda: self._take(worker, news))

    def keep(self, worker: str, file: Keep, chunks: Iterator[memoryview]) -> None:
        """Raises LinkError, ResourceError."""
        assigned = self._assigned().get(worker)
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
        found = [assigned.files[sha256] for assigned in self._assigned().values() if sha256 in assigned.files]
        return found[0] if found else None

    # -- one thing after the other -------------------------------------------------------------------------------------

    def _join(self, worker: str, *, device: str) -> None:
        self._gone(worker, Message("it has joined anew"))
        self._machines[worker] = _Machine(device=device)
        append_event(self._run.events, "joined", worker=worker)

    def _gone(self, worker: str, reason: str) -> None:
        machine = self._machines.get(worker)
        if machine is None:
            return
        append_event(self._run.events, "left", worker=worker, reason=reason)
        if machine.assigned is not None:
            log.info("%s is gone (%s): %s goes on elsewhere", worker, reason, machine.assigned.job, extra=TALK)
            self._end(worker, lost=reason != PAUSED, reason=reason if reason != PAUSED else "")
        del self._machines[worker]

    def _take(self, worker: str, news: JobNews) -> None:
        """Raises ResourceError."""
        assigned = self._assigned().get(worker)
        if assigned is None or assigned.job != news.job:
            return
        if news.rows:
            append_lines(assigned.run.metrics, news.rows)
            write_json(assigned.run.status, {"state": "running", "version": news.version}, private=True)
        if news.kept:
            self._adopt(worker, news.kept, assigned)
        match news.ended:
            case "":
                return
            case jobs.GIVEN_BACK:
                if news.reason:  # why it could not even begin
                    log.warning("%s gives %s back: %s", worker, assigned.job, news.reason)
                self._end(worker)
            case ended:
                self._end(worker, complete=ended == jobs.COMPLETE, lost=ended == jobs.LOST, reason=news.reason)

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
        with storage_errors(target):
            make_private(assigned.run.checkpoints)
            if target.exists():
                shutil.rmtree(target)
            arrived.rename(target)
        protect = assigned.keep_steps | {best_version(assigned.run, upto=newest_version(assigned.run))}
        prune_checkpoints(assigned.run.checkpoints, keep=assigned.keep, protect=protect)

    def _end(self, worker: str, *, complete: bool = False, lost: bool = False, reason: str = "") -> None:
        assigned, self._machines[worker].assigned = self._machines[worker].assigned, None
        assert assigned is not None
        state = "complete" if complete else "failed" if reason and not lost else "stopped"
        write_json(assigned.run.status, {"state": state, "version": newest_version(assigned.run)}, private=True)
        shutil.rmtree(assigned.incoming, ignore_errors=True)
        assigned.lock.__exit__()
        seconds = time.monotonic() - assigned.began
        ended = Ended(job=assigned.job, place=worker, complete=complete, lost=lost, seconds=seconds, reason=reason)
        self._ended.append(ended)
