"""A machine that has joined a crew to do jobs: it trains one whole run after the other, in a process of its own.

It keeps nothing that cannot be replaced: rows and checkpoints go to the coordinator as they are made, and the job's
folder is deleted when the job ends. When the connection breaks, the job ends here, and another machine goes on from
what has been sent. When its owner wants the machine back, the job is first saved, sent and given back.

Invariants
* The coordinator only decides what is trained. Settings that a run file has for its own machine do not count here
  (programs to start, other models, the number of checkpoints).
* The coordinator's files go only into this machine's cache and into the job's folder.
"""

import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cuadrilla.config import CheckpointSection, Config, LocalEngine
from cuadrilla.crew.bundle import fetch, require_work
from cuadrilla.crew.node import Node
from cuadrilla.crew.reporting import LinesKept, machine_facts, reporting
from cuadrilla.crew.worker import in_session, serve_sessions
from cuadrilla.errors import CuadrillaError, LinkError
from cuadrilla.home import Home
from cuadrilla.jobs.executor import Ended
from cuadrilla.jobs.local import LocalExecutor
from cuadrilla.link.base import LEAVES, Goodbye, Hello, Refused, Stop
from cuadrilla.link.client import Connection, GrpcLink
from cuadrilla.link.jobs import COMPLETE, FAILED, GIVEN_BACK, LOST, Assignment, CheckpointFile, JobNews, Recall
from cuadrilla.link.wire import file_chunks
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import FolderLock, RunDir, make_private, storage_errors, write_atomic
from cuadrilla.runfile import to_toml
from cuadrilla.train.checkpoint import FILES, MANIFEST, best_version, list_checkpoints, version_of

LOOK_SECONDS = 0.25
NEWS_SECONDS = 2.0
NEWS_BYTES = 2**20
SAVE_SECONDS = 60.0
"""A job that is wanted back and has not saved after this time is ended."""
RUNS, PLACE = "runs", "job"

log = logging.getLogger(__name__)


def do_jobs(node: Node, uses: Sequence[Use], *, leaving: threading.Event) -> str:
    """Do jobs until the coordinator has no more, or until `leaving` is set; then running jobs are saved and given back.
    Return why it ended. `uses`: devices of this machine; each has a worker, in a thread.

    Raises LinkError when the coordinator refuses this node or stays away, and ConfigError if another process of this
    machine does jobs for the same crew.
    """
    folder = Home.of_user().jobs / node.crew.folder.name
    make_private(folder)
    with FolderLock(folder / "lock", purpose=Message("jobs for this crew")), LinesKept() as lines:
        workers = [
            # names such as cuda:0, or cpu.2 for a second worker on the processor
            JobWorker(node, use, folder / (re.sub(r"[^a-z0-9]", "-", use.name) or "all"), lines=lines, leaving=leaving)
            for use in uses
        ]
        with ThreadPoolExecutor(len(workers)) as threads:
            first = next(as_completed([threads.submit(worker.work) for worker in workers]))
            leaving.set()  # the others save what they have
            return first.result()


@dataclass(kw_only=True)
class _Doing:
    """The job that this machine does. `name`: the job's."""

    name: str
    run: RunDir
    read_bytes: int = 0
    """Bytes of its metrics.jsonl that the coordinator has."""
    sent: set[int] = field(default_factory=set)
    """Versions whose checkpoints the coordinator has."""
    told_at: float = 0.0
    preempted_at: float | None = None


class JobWorker:
    """Worker on one device. It holds one session after the other. `folder`: of its jobs."""

    def __init__(self, node: Node, use: Use, folder: Path, *, lines: LinesKept, leaving: threading.Event) -> None:
        self._node, self._use, self._folder, self._lines, self._leaving = node, use, folder, lines, leaving
        self._executor = LocalExecutor({PLACE: use}, logs=folder / "logs")
        self._doing: _Doing | None = None
        self._held = ""
        """Why this machine leaves by itself; "" if it stays."""

    def work(self) -> str:
        """Do jobs until this machine leaves or the coordinator has no more; return why it ended."""
        shutil.rmtree(self._folder / RUNS, ignore_errors=True)  # left by a process that was killed
        return serve_sessions(self._serve, self._node, device=self._use.name, leaving=self._leaving)

    def _serve(self, connection: Connection) -> Stop:
        """Hold a session; return its Stop. Raises LinkError when it breaks."""
        require_work(self._node.describe(connection), jobs=True)
        self._held = ""
        return in_session(connection, self._node, parameters=(), work=partial(self._work, connection))

    def _work(self, connection: Connection, session: GrpcLink) -> Stop:
        session.call(Hello(speed_hint=1.0))
        beside = partial(reporting, facts=machine_facts(), round_trip=session.round_trip, lines=self._lines)
        try:
            with beside(session.call, policy=self._node.idle_policy, leave=self._hold):
                return self._follow(session, connection)
        finally:
            self._end()

    def _hold(self, reason: str) -> None:
        self._held = reason

    def _follow(self, session: GrpcLink, connection: Connection) -> Stop:
        """Follow the coordinator's messages until it says stop, or until this machine's owner wants it back."""
        while True:
            if self._leaving.is_set():
                self._held = LEAVES
            if self._held and self._doing is None:
                session.call(Goodbye(reason=self._held))
                return Stop(reason=self._held, again=self._held != LEAVES)
            match session.next_event(seconds=LOOK_SECONDS):
                case Stop() as stop:
                    return stop
                case Assignment() as order:
                    self._begin(order, session, connection)
                case Recall() as order if self._doing is not None and self._doing.name == order.job:
                    self._preempt(self._doing)
            if self._doing is not None:
                if self._held:
                    self._preempt(self._doing)
                self._look(self._doing, session)

    def _begin(self, order: Assignment, session: GrpcLink, connection: Connection) -> None:
        """Begin a job. Raises LinkError, and what keeps this machine from doing the job; that is sent back, too."""
        self._end()
        try:
            self._doing = self._prepare(order, connection)
            self._executor.start(order.job, self._doing.run, place=PLACE)
            log.info("job        %s", order.job, extra=TALK)
        except CuadrillaError as error:
            if isinstance(error, Refused) or not isinstance(error, LinkError):
                session.call(JobNews(job=order.job, ended=GIVEN_BACK, reason=error.message))
                session.call(Goodbye(reason=error.message))
            raise

    def _prepare(self, order: Assignment, connection: Connection) -> _Doing:
        """Make the job's run directory. Raises LinkError, Refused, ConfigError, ResourceError."""
        run = RunDir(self._folder / RUNS / order.job)
        shutil.rmtree(run.path, ignore_errors=True)
        make_private(run.path)
        config, files = fetch(connection, order.run, home=self._node.home, report=self._node.tell)
        goes_on = any(file.path.startswith("checkpoints/") for file in order.begun)
        config = settings_here(config, files, goes_on=goes_on)
        with storage_errors(run.path):
            for file in order.begun:
                (run.path / file.path).parent.mkdir(parents=True, exist_ok=True)
                connection.fetch(file, to=run.path / file.path)
            if config.model.init:  # with this folder, no model of this machine is read, whatever `model.init` says
                make_private(run.initial)
            for sent in (RunDir(files).teachers, RunDir(files).initial):
                if sent.is_dir():
                    shutil.copytree(sent, run.path / sent.name, dirs_exist_ok=True)
        write_atomic(run.run_file, to_toml(config), private=True)
        return _Doing(
            name=order.job,
            run=run,
            read_bytes=run.metrics.stat().st_size if run.metrics.exists() else 0,
            sent={version_of(path) for path in list_checkpoints(run.checkpoints)},
        )

    def _preempt(self, doing: _Doing) -> None:
        """Have the job saved; `_look` gives it back then."""
        doing.preempted_at = doing.preempted_at or time.monotonic()
        self._executor.preempt(doing.name)

    def _look(self, doing: _Doing, session: GrpcLink) -> None:
        """Send new rows and checkpoints, and how the job ended if it has. Raises LinkError."""
        ended, now = next(iter(self._executor.poll()), None), time.monotonic()
        if ended is None and doing.preempted_at is not None and now - doing.preempted_at > SAVE_SECONDS:
            log.warning("%s does not save; it is ended", doing.name)
            ended = Ended(job=doing.name, place=PLACE)
        if ended is not None or now - doing.told_at >= NEWS_SECONDS:
            self._send(doing, session)
        if ended is not None:
            failed = LOST if ended.lost else FAILED if ended.reason else GIVEN_BACK
            how = COMPLETE if ended.complete else failed
            session.call(JobNews(job=doing.name, ended=how, reason=ended.reason))
            log.info("job        %s: %s", doing.name, how, extra=TALK)
            self._end()

    def _send(self, doing: _Doing, session: GrpcLink) -> None:
        """Send rows, then the newest and the best checkpoint. Raises LinkError."""
        doing.told_at = time.monotonic()
        there = list_checkpoints(doing.run.checkpoints)
        newest = max(map(version_of, there), default=0)
        wanted = {newest, best_version(doing.run, upto=newest)} - {0, *doing.sent}
        for news in _new_rows(doing):
            session.call(news)
        for path in (path for path in there if version_of(path) in wanted):
            for name in (*FILES, MANIFEST):
                if not (path / name).exists():  # removed meanwhile, since there is a newer one
                    break
                file = CheckpointFile(job=doing.name, path=f"checkpoints/{path.name}/{name}")
                session.send(file, file_chunks(path / name))
            doing.sent.add(version_of(path))

    def _end(self) -> None:
        """Clear the job away: it has ended, or goes on elsewhere."""
        if self._doing is None:
            return
        self._executor.close()
        shutil.rmtree(self._doing.run.path, ignore_errors=True)
        self._doing = None


def settings_here(config: Config, files: Path, *, goes_on: bool) -> Config:
    """Settings of another machine's run that count here, with paths to the fetched files. `goes_on`: the run resumes
    from a checkpoint. Raises Refused for a run that needs a model which was not sent with it: a model of this machine
    at the same path must not be used."""
    needed = [files / "teachers" / str(number) for number in range(len(config.train.teacher))]
    if config.model.init and not goes_on:
        needed.append(RunDir(files).initial)
    if not all(map(Path.is_dir, needed)):
        raise Refused(
            "the coordinator's run begins from a model that it does not send",
            hint="install the same version on both machines",
        )
    saved = CheckpointSection(**config.checkpoint.model_dump(exclude={"keep"}))
    config = config.for_others().model_copy(update={"checkpoint": saved})
    config = config.moved(lambda path: str(files / path))
    return config.model_copy(update={"engine": LocalEngine()})


def _new_rows(doing: _Doing) -> Iterator[JobNews]:
    """Rows that have been completely written since the last call."""
    if not doing.run.metrics.exists():
        return
    with open(doing.run.metrics, "rb") as file:
        file.seek(doing.read_bytes)
        while lines := [line for line in file.readlines(NEWS_BYTES) if line.endswith(b"\n")]:
            doing.read_bytes += sum(map(len, lines))
            version = json.loads(lines[-1])["version"]
            yield JobNews(job=doing.name, rows=b"".join(lines).decode(errors="replace"), version=version)
