"""A machine that has joined a crew to do jobs: it trains one whole run after the other, in a process of its own.

It keeps nothing that cannot be replaced: rows and checkpoints go to the coordinator as they are made, and the job's
folder is deleted when the job ends. When the connection breaks, the job ends here, and another machine goes on from
what has been sent. When its owner wants the machine back, the job is first saved, sent and given back.

Invariants
* The coordinator only decides what is trained. Settings that a run file has for its own machine do not count here
  (programs to start, other models, the number of checkpoints).
* The coordinator's files go only into this machine's cache and into the job's folder.
"""

import logging
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from cuadrilla.config import Config, LocalEngine
from cuadrilla.crew.bundle import fetch_run, require_work
from cuadrilla.crew.node import Node
from cuadrilla.crew.reporting import NewestLines, machine_facts, reporting
from cuadrilla.crew.worker import in_session, serve_sessions
from cuadrilla.errors import CuadrillaError, LinkError
from cuadrilla.home import Home
from cuadrilla.jobs.executor import Ended
from cuadrilla.jobs.local import LocalExecutor
from cuadrilla.link.base import LEAVES, Goodbye, Hello, Refused, Stop
from cuadrilla.link.client import Connection, GrpcLink
from cuadrilla.link.jobs import Assignment, CheckpointFile, JobNews, Recall
from cuadrilla.link.wire import file_chunks
from cuadrilla.log import NOTE
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import FolderLock, RunDir, make_private, storage_errors, write_atomic
from cuadrilla.runfile import to_toml
from cuadrilla.train.checkpoint import FILES, MANIFEST, list_checkpoints

LOOK_SECONDS = 1.0
NEWS_BYTES = 2**20
RUNS, PLACE = "runs", "job"
COMPLETE = {True: Message("complete"), False: Message("given back")}
KEPT_CHECKPOINTS = 2

log = logging.getLogger(__name__)


def do_jobs(node: Node, uses: Sequence[Use], *, leaving: threading.Event) -> str:
    """Do jobs until the coordinator has no more, or until `leaving` is set; then running jobs are saved and given back.
    Return why it ended. `uses`: devices of this machine; each has a worker, in a thread.

    Raises LinkError when the coordinator refuses this node or stays away, and ConfigError if another process of this
    machine does jobs for the same crew.
    """
    folder = Home.of_user().jobs / node.crew.folder.name
    make_private(folder)
    with FolderLock(folder / "lock"), NewestLines() as lines:
        workers = [
            # names such as cuda:0, or cpu.2 for a second worker on the processor
            JobWorker(node, use, folder / (re.sub(r"[^a-z0-9]", "-", use.name) or "all"), lines=lines, leaving=leaving)
            for use in uses
        ]
        with ThreadPoolExecutor(len(workers)) as threads:
            first = next(as_completed([threads.submit(worker.work) for worker in workers]))
            leaving.set()  # the others save what they have
            return first.result()


class Outbox:
    """Sends what is new in a job's run. What is there when this is made came from the coordinator."""

    def __init__(self, connection: Connection, job: str, run: RunDir) -> None:
        self._connection, self._job, self._run = connection, job, run
        self._read_bytes = run.metrics.stat().st_size if run.metrics.exists() else 0
        self._sent = {path.name for path in list_checkpoints(run.checkpoints)}

    def send(self, session: GrpcLink) -> None:
        """Send new rows, then new checkpoints, the newest first. Raises LinkError."""
        for news in self._new_rows():
            session.call(news)
        for path in reversed(list_checkpoints(self._run.checkpoints)):
            if path.name not in self._sent:
                self._send_checkpoint(path)
                self._sent.add(path.name)

    def _send_checkpoint(self, path: Path) -> None:
        for name in (*FILES, MANIFEST):
            if not (path / name).exists():  # removed meanwhile, since there are newer ones
                return
            file = CheckpointFile(job=self._job, path=f"checkpoints/{path.name}/{name}")
            list(self._connection.ask(file, file_chunks(path / name)))

    def _new_rows(self) -> Iterator[JobNews]:
        """Rows that have been completely written since the last call."""
        if not self._run.metrics.exists():
            return
        with open(self._run.metrics, "rb") as file:
            file.seek(self._read_bytes)
            while lines := [line for line in file.readlines(NEWS_BYTES) if line.endswith(b"\n")]:
                self._read_bytes += sum(map(len, lines))
                yield JobNews(job=self._job, rows=b"".join(lines).decode(errors="replace"))


class JobWorker:
    """Worker on one device. It holds one session after the other. `folder`: of its jobs."""

    def __init__(self, node: Node, use: Use, folder: Path, *, lines: NewestLines, leaving: threading.Event) -> None:
        self._node, self._use, self._folder, self._lines, self._leaving = node, use, folder, lines, leaving
        self._executor = LocalExecutor({PLACE: use}, logs=folder / "logs")

    def work(self) -> str:
        """Do jobs until this machine leaves or the coordinator has no more; return why it ended."""
        shutil.rmtree(self._folder / RUNS, ignore_errors=True)  # left by a process that was killed
        return serve_sessions(self._serve, self._node, device=self._use.name, leaving=self._leaving)

    def _serve(self, connection: Connection) -> Stop:
        """Hold a session; return its Stop. Raises LinkError when it breaks."""
        require_work(self._node.describe(connection), jobs=True)
        return in_session(connection, self._node, parameters=(), work=partial(self._work, connection))

    def _work(self, connection: Connection, session: GrpcLink) -> Stop:
        session.call(Hello(speed_hint=1.0))
        beside = partial(reporting, facts=machine_facts(), round_trip=session.round_trip, lines=self._lines)
        with beside(session.call, policy=self._node.idle_policy, leave=session.hold):
            stop: Stop | None = None
            while stop is None:
                match self._next_event(session):
                    case Stop() as stop:
                        pass
                    case Assignment() as order:
                        stop = self._do(order, connection, session)
            if stop.again:
                session.call(Goodbye(reason=stop.reason))
            return stop if not self._leaving.is_set() else Stop(reason=LEAVES)

    def _next_event(self, session: GrpcLink) -> object:
        """The next message, if one comes within LOOK_SECONDS; if none comes and this machine is to leave, a Stop."""
        event = session.next_event(seconds=LOOK_SECONDS)
        return Stop(reason=LEAVES, again=True) if event is None and self._leaving.is_set() else event

    def _do(self, order: Assignment, connection: Connection, session: GrpcLink) -> Stop | None:
        """Do a job to its end; it is saved and given back early if it is recalled or this machine leaves. Return the
        Stop that came meanwhile. Raises LinkError, and what keeps this machine from doing the job."""
        run, ended = RunDir(self._folder / RUNS / order.job), list[Ended]()
        stop: Stop | None = None
        try:
            outbox = self._begin(order, run, connection, session)
            while not ended:
                match self._next_event(session):
                    case Stop(again=False) as stop:
                        return stop
                    case Stop() as stop:
                        self._executor.preempt(order.job)
                    case Recall():
                        self._executor.preempt(order.job)
                ended = self._executor.poll()
                outbox.send(session)
            end = ended[0]
            session.call(JobNews(job=order.job, ended=True, complete=end.complete, lost=end.lost, reason=end.reason))
            log.log(NOTE, "job %s: %s", _folder(order.job), end.reason or COMPLETE[end.complete])
            return stop
        finally:
            self._executor.close()
            shutil.rmtree(run.path, ignore_errors=True)

    def _begin(self, order: Assignment, run: RunDir, connection: Connection, session: GrpcLink) -> Outbox:
        """Make the job's run directory and begin to train. What keeps this machine from it is sent back, too."""
        try:
            config = fetch_run(connection, order.run, run, home=self._node.home, report=self._node.tell)
            write_atomic(run.run_file, to_toml(settings_here(config)), private=True)
            with storage_errors(run.path):
                for file in order.begun:
                    (run.path / file.path).parent.mkdir(parents=True, exist_ok=True)
                    connection.fetch(file, to=run.path / file.path)
            outbox = Outbox(connection, order.job, run)
            self._executor.start(order.job, run, place=PLACE)
        except CuadrillaError as error:
            if isinstance(error, Refused) or not isinstance(error, LinkError):
                session.call(JobNews(job=order.job, ended=True))
                session.call(Goodbye(reason=error.message))
            raise
        log.log(NOTE, "job %s", _folder(order.job))
        return outbox


def _folder(job: str) -> str:
    """The name of a queue's job as a person knows it: without the hash. A search's jobs have none."""
    return job.rpartition("-")[0] or job


def settings_here(config: Config) -> Config:
    """Settings of another machine's run with which one worker trains it, and keeps few checkpoints."""
    kept = config.checkpoint.model_copy(update={"keep": KEPT_CHECKPOINTS})
    return config.model_copy(update={"engine": LocalEngine(), "checkpoint": kept})
