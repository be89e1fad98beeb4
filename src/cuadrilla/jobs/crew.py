"""Jobs on the machines of a crew: each worker that has joined does one job after the other.

A machine gets a job's run file, the files that it needs, and the rows and the newest checkpoint that another
machine has made of it. It sends rows and checkpoints back as they are made. So if a machine is lost, only the work
since the last checkpoint is lost with it.

Invariants
* Rows, files and the end of a job are accepted only from the machine that has it. A checkpoint counts when it agrees
  with its manifest.
* A machine whose session has ended has lost its job. The link ends that of a silent one.
"""

import logging
import queue
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.crew.bundle import offer
from cuadrilla.errors import CheckpointError, ResourceError
from cuadrilla.home import Home
from cuadrilla.jobs.executor import Ended
from cuadrilla.link.address import Address
from cuadrilla.link.base import Goodbye, Hello, NodeReport, RunDescription, ToCoordinator, offered
from cuadrilla.link.jobs import METRICS, Assignment, CheckpointFile, JobNews, Recall
from cuadrilla.link.server import CrewServer
from cuadrilla.messages import Message
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import (
    FolderLock,
    KeptLines,
    RunDir,
    event_line,
    file_sha256,
    make_private,
    write_atomic,
    write_json,
)
from cuadrilla.runfile import dump, read_run_file
from cuadrilla.train.checkpoint import (
    FILES,
    MANIFEST,
    adopt_checkpoint,
    best_version,
    find_newest,
    list_checkpoints,
    prune_checkpoints,
    version_of,
)
from cuadrilla.train.nodelog import NodeLogs
from cuadrilla.train.setup import make_task, measure_length
from cuadrilla.train.teachers import keep_teachers
from cuadrilla.user_file import UsersCode

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class AssignedJob:
    job: str
    run: RunDir
    rows: KeptLines
    """Its metrics."""
    incoming: Path
    """The folder of files that its machine sends."""
    held: ExitStack
    """The run's lock and that folder, for as long as a machine has the job."""
    keep: int
    files: Mapping[str, tuple[Path, str]]
    """Files that its machine may fetch, as in an `Offer`."""
    preempted: bool = False


class CrewExecutor:
    """Executor whose places are the machines that join this machine's crew. Used by one thread; the link's threads use
    it as a `JobReceiver`."""

    def __init__(self, home: Home, *, listen: Address, folder: Path) -> None:
        """`folder`: of the queue or search; it has the machines' logs and events, as a run does. Raises LinkError."""
        run = RunDir(folder)
        self._logs, self._events = NodeLogs(run.nodes), KeptLines(run.events)
        self._heard: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._machines: dict[str, AssignedJob | None] = {}
        """The workers that have joined, each with its job."""
        self._ended: list[Ended] = []
        self.crew = CrewServer(home, receive=self.receive, jobs=self)
        self.crew.open(listen)

    # -- Executor ------------------------------------------------------------------------------------------------------

    @property
    def places(self) -> dict[str, str]:
        return {name: assigned.job if assigned else "" for name, assigned in sorted(self._machines.items())}

    def _assigned(self) -> dict[str, AssignedJob]:
        return {name: assigned for name, assigned in list(self._machines.items()) if assigned is not None}

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        """Raises as `assign`."""
        self._machines[place], order = assign(job, run)
        self._note("assigned", worker=place, job=job)
        self.crew.send(place, order)

    def poll(self) -> list[Ended]:
        while not self._heard.empty():
            self._heard.get()()
        self.crew.end_kicked()
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

    def receive(self, worker: str, message: ToCoordinator | NodeReport | JobNews) -> None:
        match message:
            case Hello():
                self._heard.put(lambda: self._join(worker))
            case Goodbye():
                self._heard.put(lambda: self._gone(worker, message.reason))
            case NodeReport():
                self._logs.report(worker, message)
            case JobNews():
                self._heard.put(lambda: self._take(worker, message))

    def keep(self, worker: str, file: CheckpointFile, chunks: Iterator[bytes]) -> None:
        assigned = self._assigned().get(worker)
        if assigned is None or assigned.job != file.job:  # this machine has lost the job
            deque(chunks, maxlen=0)
            return
        target = assigned.incoming / file.path.removeprefix("checkpoints/")
        make_private(target.parent)
        write_atomic(target, chunks, private=True)
        if target.name == MANIFEST:  # the last of its files
            self._heard.put(lambda: self._adopt(worker, assigned, target.parent))

    def file(self, worker: str, path: str) -> Path | None:
        assigned = self._assigned().get(worker)
        return assigned.files[path][0] if assigned is not None and path in assigned.files else None

    # -- in the executor's thread --------------------------------------------------------------------------------------

    def _note(self, kind: str, **fields: str) -> None:
        with suppress(ResourceError):
            self._events.append(event_line(kind, fields))

    def _join(self, worker: str) -> None:
        self._gone(worker, Message("it has joined anew"))
        self._machines[worker] = None
        self._note("joined", worker=worker)

    def _gone(self, worker: str, reason: str) -> None:
        if worker not in self._machines:
            return
        self._note("left", worker=worker, reason=reason)
        if self._machines[worker] is not None:
            self._end(worker, lost=True, reason=reason)
        del self._machines[worker]

    def _take(self, worker: str, news: JobNews) -> None:
        assigned = self._assigned().get(worker)
        if assigned is None or assigned.job != news.job:
            return
        if news.rows:
            with suppress(ResourceError):  # a full disk ends no job
                assigned.rows.append(news.rows)
        if news.ended:
            self._end(worker, complete=news.complete, lost=news.lost, reason=news.reason)

    def _adopt(self, worker: str, assigned: AssignedJob, arrived: Path) -> None:
        """Make a checkpoint of which all files have arrived one of the run's, if this machine still has the job."""
        if self._assigned().get(worker) is not assigned:
            return
        try:
            adopt_checkpoint(arrived, assigned.run.checkpoints)
        except (CheckpointError, ResourceError) as error:
            log.warning("a checkpoint from %s cannot be used: %s", worker, error.message)
            shutil.rmtree(arrived, ignore_errors=True)
            return
        newest = version_of(list_checkpoints(assigned.run.checkpoints)[-1])
        best = best_version(assigned.run, upto=newest)
        prune_checkpoints(assigned.run.checkpoints, keep=assigned.keep, protect={best})

    def _end(self, worker: str, *, complete: bool = False, lost: bool = False, reason: str = "") -> None:
        assigned, self._machines[worker] = self._machines[worker], None
        assert assigned is not None
        state = "complete" if complete else "failed" if reason and not lost else "stopped"
        self._note("returned", worker=worker, job=assigned.job, state=state)
        with suppress(ResourceError):
            write_json(assigned.run.status, {"state": state}, private=True)
        assigned.held.close()
        self._ended.append(Ended(job=assigned.job, place=worker, complete=complete, lost=lost, reason=reason))


def assign(job: str, run: RunDir) -> tuple[AssignedJob, Assignment]:
    """The job in `run` and its message for a machine; the run is locked while the machine has it.

    Raises ConfigError for a run that another process trains, DataError, CheckpointError, TaskError, ResourceError.
    """
    resolved, incoming = read_run_file(run.run_file), run.path / ".incoming"
    with ExitStack() as held:
        held.enter_context(FolderLock(run.lock))
        shutil.rmtree(incoming, ignore_errors=True)  # left by a coordinator that was killed
        held.callback(shutil.rmtree, incoming, ignore_errors=True)
        config, _ = decide(resolved.config.for_others(), run)
        with UsersCode():
            task = make_task(config, run.path)
        keep_teachers(config, run, task=task)
        begun = _begun(run)
        found = offer(config, run.path, initial=not list_checkpoints(run.checkpoints))
        known = {"origins": resolved.origins, "num_steps": measure_length(config, task).num_steps}
        write_json(run.config, {"values": dump(config), **known}, private=True)
        write_json(run.status, {"state": "running"}, private=True)
        description = RunDescription(config=found.config, files=offered(found.files))
        order = Assignment(job=job, run=description, begun=offered(begun))
        assigned = AssignedJob(
            job=job,
            run=run,
            rows=KeptLines(run.metrics),
            incoming=incoming,
            held=held.pop_all(),
            keep=config.checkpoint.keep,
            files={**found.files, **begun},
        )
    return assigned, order


def _begun(run: RunDir) -> dict[str, tuple[Path, str]]:
    """The files from which another machine goes on: the rows, and the newest checkpoint that verifies.

    Those after it are set aside: they would count as newer than all that machines send. Raises CheckpointError if there
    are checkpoints and none verifies.
    """
    found = {}
    if (newest := find_newest(run.checkpoints, set_aside=True)) is not None:
        found = {f"checkpoints/{newest.name}/{name}": newest / name for name in (*FILES, MANIFEST)}
    if run.metrics.exists():
        found[METRICS] = run.metrics
    return {name: (path, file_sha256(path)) for name, path in found.items()}
