"""A machine that has joined a crew which takes jobs: it trains one whole run after the other, in a process of its own.

It keeps nothing that cannot be replaced: rows and checkpoints go to the coordinator as they come, and the folder of a
job is deleted when it ends. When the connection breaks, the job is ended here too: another machine goes on with it from
what has been sent. When its owner wants the machine back, the job is saved, sent and given back first.

Invariants
* A coordinator decides what is trained, and nothing else here: of its configuration only what a training computes is
  kept, without what a run file may say of its own machine (programs to start, other models, how many checkpoints).
* It writes into this machine's cache and into the folder of the job.
"""

import json
import logging
import queue
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cuadrilla.config import CheckpointSection, Config, LocalEngine
from cuadrilla.crew.bundle import fetch, require_work
from cuadrilla.crew.idle_policy import IdlePolicy
from cuadrilla.crew.node import Node
from cuadrilla.crew.reporting import LinesKept, machine_facts, reporting
from cuadrilla.crew.worker import LEAVES, in_session, serve_sessions
from cuadrilla.errors import CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.home import Home
from cuadrilla.jobs.local import LocalExecutor, LocalPlace
from cuadrilla.link.base import Goodbye, Hello, Refused, RunDescription, Stop
from cuadrilla.link.client import Connection, GrpcLink
from cuadrilla.link.jobs import (
    COMPLETE,
    DEVICE,
    FAILED,
    GIVEN_BACK,
    Assignment,
    JobNews,
    Keep,
    Recall,
)
from cuadrilla.link.wire import file_chunks
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import FolderLock, RunDir, make_private, storage_errors, write_atomic
from cuadrilla.runfile import to_toml
from cuadrilla.train.checkpoint import FILES, MANIFEST, best_version, list_checkpoints, version_of
from cuadrilla.version import __version__

LOOK_SECONDS = 0.25
NEWS_SECONDS = 2.0
NEWS_BYTES = 2**20
SAVE_SECONDS = 60.0
"""A job that has not saved by then is ended: somebody wants it, or this machine, back."""
END_SECONDS = 10.0
CHECKPOINT_FILES = (*FILES, MANIFEST)
RUNS = "runs"

log = logging.getLogger(__name__)


def do_jobs(node: Node, uses: Sequence[Use], *, leaving: threading.Event) -> str:
    """Until the coordinator has no more, or until `leaving` is set: then what is under way is saved and given back.
    Why it ended. `uses`: of this machine's devices, a worker for each.

    Raises LinkError when the coordinator refuses this node or stays away, and ConfigError where another process of
    this machine does the same.
    """
    assert node.idle_policy is not None
    folder = Home.of_user().jobs / node.crew.folder.name
    make_private(folder)
    with FolderLock(folder / "lock", purpose=Message("jobs for this crew")), LinesKept() as lines:
        workers = [
            JobWorker(
                node=node,
                use=use,
                idle_policy=node.idle_policy,
                folder=folder / (re.sub(r"[^a-z0-9]", "-", use.name) or "all"),  # cuda:0, and cpu.2 for the second one
                lines=lines,
                leaving=leaving,
            )
            for use in uses
        ]
        try:
            return workers[0].work() if len(workers) == 1 else _together(workers, leaving)
        finally:
            node.idle_policy.close()


def _together(workers: "list[JobWorker]", leaving: threading.Event) -> str:
    """In a thread each; what the first one that ended said. The others save what they have, and leave."""
    said: queue.SimpleQueue[str | CuadrillaError] = queue.SimpleQueue()

    def work(worker: JobWorker) -> None:
        try:
            said.put(worker.work())
        except CuadrillaError as error:
            said.put(error)
        finally:
            leaving.set()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    while not leaving.wait(1.0):  # Ctrl-C once more: their jobs end with this process
        pass
    for thread in threads:
        thread.join(SAVE_SECONDS + END_SECONDS)
    if said.empty():
        raise EnvironmentProblem("a worker of this machine has failed", hint="join again; its log has more")
    first = said.get()
    if isinstance(first, CuadrillaError):
        raise first
    return first


@dataclass(kw_only=True)
class _Doing:
    """A job of this machine. `name`: of the job."""

    name: str
    run: RunDir
    read_bytes: int = 0
    """Of its rows: what is before is known there."""
    keep_steps: frozenset[int] = frozenset()
    sent: set[int] = field(default_factory=set)
    """Versions whose checkpoints are there."""
    told_at: float = 0.0
    preempted_at: float | None = None


@dataclass(kw_only=True)
class JobWorker:
    """One session after the other. `folder` holds jobs."""

    node: Node
    use: Use
    idle_policy: IdlePolicy
    folder: Path
    lines: LinesKept
    leaving: threading.Event
    held: str = ""
    """Why it leaves by itself."""
    _executor: LocalExecutor | None = None
    _doing: _Doing | None = None

    def work(self) -> str:
        """Until this machine leaves or the coordinator has no more; why it ended."""
        shutil.rmtree(self.folder / RUNS, ignore_errors=True)  # of one that was killed
        return serve_sessions(self.serve, self.node, device=self.use.name, leaving=self.leaving)

    def serve(self, connection: Connection) -> Stop | None:
        """One session, from Hello to Stop; None where it left by itself. Raises LinkError when it breaks."""
        require_work(connection.describe(), jobs=True)
        self.held = ""
        work = partial(self._work, connection)
        stop = in_session(connection, self.node, parameters=(), work=work)
        return None if self.held and stop.again else stop

    def _work(self, connection: Connection, session: GrpcLink) -> Stop:
        device = (self.use.device or "cpu").partition(":")[0]
        session.call(Hello(speed_hint=1.0, environment={"cuadrilla": __version__, DEVICE: device}))
        beside = partial(reporting, facts=machine_facts(), round_trip=session.round_trip, lines=self.lines)
        try:
            with beside(session.call, policy=self.idle_policy, leave=self._hold):
                return self._follow(session, connection)
        finally:
            self._drop()

    def _hold(self, reason: str) -> None:
        self.held = reason

    def _follow(self, session: GrpcLink, connection: Connection) -> Stop:
        """Do what the coordinator says until it says stop, or until this machine is wanted back."""
        while True:
            if self.leaving.is_set():
                self.held = LEAVES
            if self.held and self._saved():
                session.call(Goodbye(reason=self.held))
                return Stop(reason=self.held, again=True)
            match session.next_event(seconds=LOOK_SECONDS):
                case Stop() as stop:
                    return stop
                case Assignment() as order:
                    self._try(order, session, connection)
                case Recall() as order if self._doing is not None and self._doing.name == order.job:
                    self._preempt()
            if self._doing is not None:
                self._look(self._doing, session)

    def _try(self, order: Assignment, session: GrpcLink, connection: Connection) -> None:
        """Raises LinkError; and what keeps this machine from doing such jobs, of which the coordinator is told."""
        try:
            self._begin(order, connection)
        except CuadrillaError as error:
            if isinstance(error, Refused) or not isinstance(error, LinkError):
                session.call(JobNews(job=order.job, ended=GIVEN_BACK, reason=error.message))
                session.call(Goodbye(reason=error.message))
            raise

    def _begin(self, order: Assignment, connection: Connection) -> None:
        """Raises LinkError, Refused, ConfigError, ResourceError."""
        self._drop()
        folder = self.folder / RUNS / order.job
        shutil.rmtree(folder, ignore_errors=True)
        make_private(folder)
        doing = self._run(order, connection, folder)
        log.info("job        %s", order.job, extra=TALK)
        if self._executor is None:
            self._executor = self._open_executor()
        self._doing = doing
        self._executor.start(doing.name, doing.run, place="job")

    def _open_executor(self) -> LocalExecutor:
        use = self.use
        place = LocalPlace(name="job", device=use.device, threads=use.threads, environment=use.environment)
        return LocalExecutor([place], logs=self.folder / "logs")

    def _run(self, order: Assignment, connection: Connection, folder: Path) -> _Doing:
        """Raises LinkError, Refused, ConfigError, ResourceError."""
        description = RunDescription(config=order.config, files=order.files)
        config, files = fetch(connection, description, home=self.node.home, report=self.node.tell)
        goes_on = any(file.path.startswith("checkpoints/") for file in order.begun)
        config = settings_here(config, files, goes_on=goes_on)
        run = RunDir(folder)
        with storage_errors(folder):
            for file in order.begun:
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                connection.fetch(file, to=folder / file.path)
            if config.model.init:  # of this machine's models none is read, whatever the path
                make_private(run.initial)
            for sent in (RunDir(files).teachers, RunDir(files).initial):
                if sent.is_dir():
                    shutil.copytree(sent, folder / sent.name, dirs_exist_ok=True)
        write_atomic(run.run_file, to_toml(config), private=True)
        rows = run.metrics.stat().st_size if run.metrics.exists() else 0
        return _Doing(
            name=order.job,
            run=run,
            read_bytes=rows,
            keep_steps=frozenset(config.checkpoint.keep_steps),
            sent={version_of(path) for path in list_checkpoints(run.checkpoints)},
        )

    def _look(self, doing: _Doing, session: GrpcLink) -> None:
        """Send what is new; begin again what was killed. Raises LinkError."""
        assert self._executor is not None
        left, now = next(iter(self._executor.poll()), None), time.monotonic()
        hangs = left is None and doing.preempted_at is not None and now - doing.preempted_at > SAVE_SECONDS
        if left is None and not hangs:
            if now - doing.told_at >= NEWS_SECONDS:
                self._send(doing, session)
            return
        if left is not None and not (left.complete or left.reason or doing.preempted_at is not None):
            log.warning("%s was killed; it goes on", doing.name)
            self._executor.start(doing.name, doing.run, place="job")
            return
        if hangs:
            log.warning("%s does not save; it is ended", doing.name)
        if doing.preempted_at is not None:  # a process that was told to save ends by itself, a moment later
            self._end_process()
        self._send(doing, session)
        ended = GIVEN_BACK if left is None else COMPLETE if left.complete else FAILED if left.reason else GIVEN_BACK
        reason = left.reason if left is not None and ended == FAILED else ""
        session.call(JobNews(job=doing.name, ended=ended, reason=reason))
        log.info("job        %s: %s", doing.name, ended, extra=TALK)
        shutil.rmtree(doing.run.path, ignore_errors=True)
        self._doing = None

    def _send(self, doing: _Doing, session: GrpcLink) -> None:
        """Rows, then checkpoints: the newest, the best, and those that are to be kept. Raises LinkError."""
        doing.told_at = time.monotonic()
        there = list_checkpoints(doing.run.checkpoints)
        newest = max(map(version_of, there), default=0)
        wanted = {*doing.keep_steps, newest, best_version(doing.run, upto=newest)}
        for news in _new_rows(doing):
            session.call(news)
        for path in there:
            version = version_of(path)
            if version in doing.sent or version not in wanted or not version:  # anybody can begin
                continue
            for name in CHECKPOINT_FILES:
                if not (path / name).exists():  # a newer one has taken its place meanwhile
                    break
                file = Keep(name=f"{doing.name}/checkpoints/{path.name}/{name}")
                session.send(file, file_chunks(path / name))
            else:
                session.call(JobNews(job=doing.name, kept=version))
            doing.sent.add(version)

    def _preempt(self) -> None:
        """Have the job save; `_look` gives it back."""
        if self._doing is not None and self._doing.preempted_at is None and self._executor is not None:
            self._doing.preempted_at = time.monotonic()
            self._executor.preempt(self._doing.name)

    def _saved(self) -> bool:
        """Whether nothing is under way any more, once it was told to end."""
        self._preempt()
        return self._doing is None

    def _drop(self) -> None:
        """End what is under way here: it goes on elsewhere."""
        if self._doing is not None:
            self._end_process()
            shutil.rmtree(self._doing.run.path, ignore_errors=True)
            self._doing = None

    def _end_process(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None


def settings_here(config: Config, files: Path, *, goes_on: bool) -> Config:
    """Those of another machine's run that count here, with paths that lead to what was fetched. `goes_on`: from a
    checkpoint. Raises Refused for a run that needs a model which did not come with it: there may be one here at that
    path, and it is nobody else's."""
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
    """Whole lines that have been written since the last time."""
    if not doing.run.metrics.exists():
        return
    with open(doing.run.metrics, "rb") as file:
        file.seek(doing.read_bytes)
        while lines := [line for line in file.readlines(NEWS_BYTES) if line.endswith(b"\n")]:
            doing.read_bytes += sum(map(len, lines))
            version = json.loads(lines[-1])["version"]
            yield JobNews(job=doing.name, rows=b"".join(lines).decode(errors="replace"), version=version)
