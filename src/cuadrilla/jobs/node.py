"""A machine that has joined a crew which takes jobs: it does one after the other, in a process of its own, whole runs
and calls of a function.

It keeps nothing that cannot be replaced: rows and checkpoints go to the coordinator as they come, and the folder of a
job is deleted when it ends. When the connection breaks, the job is ended here too: another machine goes on with it from
what has been sent. When its owner wants the machine back, the job is saved, sent and given back first.

Invariants
* A coordinator decides what is trained, and nothing else here: of its configuration only what a training computes is
  kept, without what a run file may say of its own machine (programs to start, other models, how many checkpoints).
* It writes into this machine's cache and into the folder of the job, and leaves `SPARE_BYTES` of the disk.
"""

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cuadrilla.config import CheckpointSection, Config, FileTaskSection, LocalEngine
from cuadrilla.engines.bundle import bundle_hash, fetch, fetch_code
from cuadrilla.engines.courtesy import Courtesy
from cuadrilla.engines.local import num_cores
from cuadrilla.engines.node import worker_options
from cuadrilla.engines.ray.node import Ways
from cuadrilla.engines.reporting import LinesKept, lines_kept, machine_facts, reporting
from cuadrilla.engines.worker import Patience, WorkerOptions, ended_by
from cuadrilla.errors import CheckpointError, CuadrillaError, EnvironmentProblem, LinkError, ResourceError
from cuadrilla.home import Home
from cuadrilla.jobs.calls import CallPlaces, end_of_talk, require_callable_here, write_call
from cuadrilla.jobs.places import LocalPlace, Places
from cuadrilla.link.base import LENT, PAUSED, Goodbye, Hello, Paused, Refused, Stop
from cuadrilla.link.grpc_client import Connection
from cuadrilla.link.jobs import (
    COMPLETE,
    DEVICE,
    FAILED,
    GIVEN_BACK,
    MAX_ROWS,
    METRICS,
    TALK_FILE,
    Assignment,
    JobConnection,
    JobNews,
    JobSession,
    Recall,
    Row,
    usable_row,
)
from cuadrilla.link.offer import RunDescription
from cuadrilla.link.wire import Layout
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import FolderLock, RunDir, make_private, storage_errors, write_atomic
from cuadrilla.runfile import to_toml
from cuadrilla.train.checkpoint import FILES, MANIFEST, best_of, list_checkpoints, version_of
from cuadrilla.version import __version__

LOOK_SECONDS = 0.25
NEWS_SECONDS = 2.0
PROMPT_NEWS, NEWS_PAUSE_SECONDS = 20, 0.25
"""Rows that gathered during a long upload are sent no faster than the coordinator takes them (`grpc_server.py`)."""
SAVE_SECONDS = 60.0
"""A job that has not saved by then is ended: somebody wants it, or this machine, back."""
END_SECONDS = 10.0
SPARE_BYTES = 2**30
CHECKPOINT_FILES = (*FILES, MANIFEST)
RUNS = "runs"
LEAVES = Message("this machine leaves")

log = logging.getLogger(__name__)


class NoJobs(CuadrillaError):
    """The coordinator trains one run with all its machines."""


def do_jobs(ways: Ways, *, moved: Callable[[str], None], data: Path | None, leaving: threading.Event) -> str:
    """Until the coordinator has no more, or until `leaving` is set: then what is under way is saved and given back.
    Why it ended. A worker for each of this machine's devices.

    Raises LinkError when the coordinator refuses this node or stays away, NoJobs, DeviceError, and ConfigError where
    another process of this machine does the same.
    """
    uses = ways.devices.choose_for_any().uses
    fetching, folder = threading.Lock(), Home.of_user().jobs / ways.crew.folder.name
    workers = [
        JobWorker(
            options=worker_options(ways, use, moved=moved),
            use=use,
            connect=partial(_connect, ways=ways, device=use.name),
            courtesy=ways.courtesy,
            report=ways.report,
            folder=folder / (re.sub(r"[^a-z0-9]", "-", use.name) or "all"),  # cuda:0, and cpu.2 for the second one
            data=data,
            fetching=fetching,
            leaving=leaving,
        )
        for use in uses
    ]
    make_private(folder)
    with FolderLock(folder / "lock", purpose=Message("jobs for this crew")), lines_kept() as lines:
        try:
            if len(workers) == 1:
                return workers[0].work(lines)
            return _together(workers, lines)
        finally:
            ways.courtesy.close()


def _connect(address: str, *, ways: Ways, device: str) -> Connection:
    return Connection(address, identity=ways.identity, term=ways.term, device=device)


def _together(workers: "list[JobWorker]", lines: LinesKept) -> str:
    """In a thread each; what the first one that ended said."""
    said: list[str | CuadrillaError] = []
    ended = threading.Event()

    def work(worker: JobWorker) -> None:
        try:
            said.append(worker.work(lines))
        except CuadrillaError as error:
            said.append(error)
        finally:
            ended.set()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        while not ended.wait(1.0):
            pass
        if workers[0].leaving.is_set():  # each saves what it has
            for thread in threads:
                thread.join(SAVE_SECONDS + END_SECONDS)
    finally:  # Ctrl-C, too: their jobs end with them, and those that wait for something end with this process
        for worker in workers:
            worker.over.set()
        for thread in threads:
            thread.join(END_SECONDS)
    if not said:
        raise EnvironmentProblem("a worker of this machine has failed", hint="join again; its log has more")
    first = said[0]
    if isinstance(first, CuadrillaError):
        raise first
    return first


@dataclass(kw_only=True)
class _Doing:
    """A job of this machine. `name`: of the job."""

    name: str
    run: RunDir
    is_call: bool = False
    read_bytes: int = 0
    """Of its rows: what is before is known there."""
    keep_steps: frozenset[int] = frozenset()
    sent: set[int] = field(default_factory=set)
    """Versions whose checkpoints are there."""
    told_at: float = 0.0
    recalled_at: float | None = None


@dataclass(kw_only=True)
class JobWorker:
    """One session after the other. `connect` dials an address, `report` hears what is fetched, `folder` holds jobs."""

    options: WorkerOptions
    use: Use
    connect: Callable[[str], JobConnection]
    courtesy: Courtesy
    report: Callable[[str], None]
    folder: Path
    data: Path | None
    fetching: threading.Lock
    """Of all workers of this machine: they fill one cache."""
    leaving: threading.Event
    over: threading.Event = field(default_factory=threading.Event)
    heard_at: float = 0.0
    standbys: tuple[str, ...] = ()
    _held: str = ""
    """Why it leaves its session by itself."""
    _places: "Places[_Doing] | CallPlaces[_Doing] | None" = None
    _doing: _Doing | None = None

    def work(self, lines: LinesKept) -> str:
        patience = Patience(self.options)
        shutil.rmtree(self.folder / RUNS, ignore_errors=True)  # of one that was killed
        while not self.over.is_set() and not self.leaving.is_set():
            patience.reached += self.courtesy.wait_until_welcome(unless=self.leaving)
            if self.leaving.is_set():
                break
            began = time.monotonic()
            connection = self.connect(patience.address)
            try:
                _require_jobs(connection.describe())
                stop = self._serve(connection, lines)
                patience.begin_anew()
                if not stop.again:
                    return ended_by(stop)
                if stop.reason == LENT:
                    log.info("%s", stop.reason, extra=TALK)
                elif stop.reason not in (self._held, PAUSED, LEAVES):
                    log.warning("%s: joining again", stop.reason)
            except Refused:
                raise
            except Paused as error:
                patience.wait_paused(error)
            except LinkError as error:
                patience.wait(error, worker=self)
            finally:
                connection.close()
                if self.heard_at > began:
                    patience.found_at(patience.address)
        return Message("another worker of this machine has ended" if self.over.is_set() else LEAVES)

    def _serve(self, connection: JobConnection, lines: LinesKept) -> Stop:
        """One session, from Hello to Stop. Raises LinkError when it breaks."""
        self._held = ""
        session = connection.session(parameters=Layout(()))
        try:
            device = (self.use.device or "cpu").partition(":")[0]
            session.call(Hello(speed_hint=1.0, environment={"cuadrilla": __version__, DEVICE: device}))
            facts = machine_facts()
            with (
                reporting(session.report, facts=facts, round_trip=session.round_trip, lines=lines),
                self.courtesy.watching(self._hold),
            ):
                return self._follow(session, connection)
        except LinkError:
            stop = session.farewell()
            if stop is None:
                raise
            return stop
        finally:
            self.heard_at, self.standbys = session.heard_at, session.standbys or self.standbys
            self._drop()
            session.close()

    def _hold(self, reason: str) -> None:
        self._held = reason

    def _follow(self, session: JobSession, connection: JobConnection) -> Stop:
        """Do what the coordinator says until it says stop, or until this machine is wanted back."""
        while not self.over.is_set():
            if session.interrupted():
                event = session.next_event()
                if isinstance(event, Stop):
                    return event
            why = LEAVES if self.leaving.is_set() else self._held
            if why and self._saved():
                session.call(Goodbye(reason=why))
                return Stop(reason=why, again=True)
            match session.next_order(timeout_seconds=LOOK_SECONDS):
                case Assignment() as order:
                    self._try(order, session, connection)
                case Recall() as order if self._doing is not None and self._doing.name == order.job:
                    self._recall()
            if self._doing is not None:
                self._look(self._doing, session)
        return Stop(reason=Message("another worker of this machine has ended"))

    def _try(self, order: Assignment, session: JobSession, connection: JobConnection) -> None:
        """Raises LinkError; and what keeps this machine from doing such jobs, of which the coordinator is told."""
        try:
            self._begin(order, connection)
        except CuadrillaError as error:
            if isinstance(error, Refused) or not isinstance(error, LinkError):
                session.tell(JobNews(job=order.job, ended=GIVEN_BACK, reason=error.message))
                session.call(Goodbye(reason=error.message))
            raise

    def _begin(self, order: Assignment, connection: JobConnection) -> None:
        """Raises LinkError, Refused, ConfigError, ResourceError."""
        self._drop()
        folder = self.folder / RUNS / order.job
        shutil.rmtree(folder, ignore_errors=True)
        make_private(folder)
        doing = self._call(order, connection, folder) if order.call else self._run(order, connection, folder)
        log.info("job        %s", order.job, extra=TALK)
        if self._places is None or isinstance(self._places, CallPlaces) != doing.is_call:
            self._end_process()
            self._places = self._call_places() if doing.is_call else self._run_places()
        self._doing = doing
        self._places.start(doing, doing.run, name="job")

    def _run_places(self) -> "Places[_Doing]":
        use = self.use
        place = LocalPlace(name="job", device=use.device, threads=use.threads, environment=use.environment)
        return Places([place], logs=self.folder / "logs")

    def _call_places(self) -> "CallPlaces[_Doing]":
        return CallPlaces(["job"], threads=self.use.threads or num_cores(), environment=self.use.environment)

    def _call(self, order: Assignment, connection: JobConnection, folder: Path) -> _Doing:
        """Raises LinkError, Refused, ResourceError."""
        call = require_callable_here(order.call, files=[file.path for file in order.files])
        with self.fetching:
            _require_room(order, home=self._home)
            code = fetch_code(connection, order.files, home=self._home, report=self.report)
        run = RunDir(folder)
        write_call(call, run, code=code)
        return _Doing(name=order.job, run=run, is_call=True)

    def _run(self, order: Assignment, connection: JobConnection, folder: Path) -> _Doing:
        """Raises LinkError, Refused, ConfigError, ResourceError."""
        home = self._home
        description = RunDescription(config=order.config, files=order.files)
        with self.fetching:
            _require_room(order, home=home)
            config, files = fetch(connection, description, home=home, report=self.report, data=self.data)
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

    def _look(self, doing: _Doing, session: JobSession) -> None:
        """Send what is new; begin again what was killed. Raises LinkError."""
        assert self._places is not None
        left, now = next(iter(self._places.look()), None), time.monotonic()
        hangs = left is None and doing.recalled_at is not None and now - doing.recalled_at > SAVE_SECONDS
        if left is None and not hangs:
            if now - doing.told_at >= NEWS_SECONDS:
                self._send(doing, session)
            return
        if left is not None and not (left.complete or left.reason or doing.recalled_at is not None):
            log.warning("%s was killed; it goes on", doing.name)
            self._places.start(doing, doing.run, name="job")
            return
        if hangs:
            log.warning("%s does not save; it is ended", doing.name)
        if doing.recalled_at is not None:  # a process that was told to save ends by itself, a moment later
            self._end_process()
        self._send(doing, session)
        ended = GIVEN_BACK if left is None else COMPLETE if left.complete else FAILED if left.reason else GIVEN_BACK
        reason = left.reason if left is not None and ended == FAILED else ""
        figures = left.figures if left is not None else {}
        if doing.is_call and (talk := end_of_talk(doing.run)) is not None:
            session.keep(f"{doing.name}/{TALK_FILE}", talk)
        session.tell(JobNews(job=doing.name, ended=ended, reason=reason, figures=figures))
        log.info("job        %s: %s", doing.name, ended, extra=TALK)
        shutil.rmtree(doing.run.path, ignore_errors=True)
        self._doing = None

    def _send(self, doing: _Doing, session: JobSession) -> None:
        """Rows, then checkpoints: the newest, the best, and those that are to be kept. Raises LinkError."""
        doing.told_at = time.monotonic()
        there = list_checkpoints(doing.run.checkpoints)
        wanted = {*doing.keep_steps, *map(version_of, there[-1:]), *_best(there)}
        for number, rows in enumerate(_new_rows(doing)):
            if number >= PROMPT_NEWS:
                time.sleep(NEWS_PAUSE_SECONDS)
            session.tell(JobNews(job=doing.name, rows=rows))
        for path in there:
            version = version_of(path)
            if version in doing.sent or version not in wanted or not version:  # anybody can begin
                continue
            for name in CHECKPOINT_FILES:
                if not (path / name).exists():  # a newer one has taken its place meanwhile
                    break
                session.keep(f"{doing.name}/checkpoints/{path.name}/{name}", path / name)
            else:
                session.tell(JobNews(job=doing.name, kept=version))
            doing.sent.add(version)

    def _recall(self) -> None:
        """Have the job save; `_look` gives it back."""
        if self._doing is not None and self._doing.recalled_at is None and self._places is not None:
            self._doing.recalled_at = time.monotonic()
            self._places.stop()

    def _saved(self) -> bool:
        """Whether nothing is under way any more, once it was told to end."""
        self._recall()
        return self._doing is None

    def _drop(self) -> None:
        """End what is under way here: it goes on elsewhere."""
        if self._doing is not None:
            self._end_process()
            shutil.rmtree(self._doing.run.path, ignore_errors=True)
            self._doing = None

    def _end_process(self) -> None:
        if self._places is not None:
            self._places.close()
            self._places = None

    @property
    def _home(self) -> Home:
        return Home.of_user()


def _require_jobs(description: RunDescription) -> None:
    if not description.takes_jobs:
        raise NoJobs("the coordinator trains one run with all its machines", hint="cuadrilla join")
    if description.cuadrilla not in ("", __version__):
        raise Refused(
            "the coordinator runs cuadrilla {theirs}, this machine {ours}",
            theirs=description.cuadrilla,
            ours=__version__,
            hint="install the same version on both machines",
        )


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
    if isinstance(config.task, FileTaskSection):
        task = config.task.model_copy(update={"path": str(files / config.task.path)})
        config = config.model_copy(update={"task": task})
    else:
        config = config.model_copy(update={"data": config.data.model_copy(update={"folder": str(files / "data")})})
    return config.model_copy(update={"engine": LocalEngine()})


def _best(there: Sequence[Path]) -> list[int]:
    """The version of these with the lowest held-out loss, if that was measured."""
    with suppress(CheckpointError):  # a newer one has taken its place meanwhile
        if there and (best := best_of(there[-1])) is not None:
            return [best[1]]
    return []


def _require_room(order: Assignment, *, home: Home) -> None:
    """Raises ResourceError unless there is room for what has to be fetched, and some to spare."""
    make_private(home.path)
    cached = home.cache / bundle_hash(order.files)[:32]
    missing = [file for file in order.files if not (cached / file.path).is_file()]
    needed = sum(file.num_bytes for file in [*missing, *order.begun]) + SPARE_BYTES
    free = shutil.disk_usage(home.path).free
    if free < needed:
        raise ResourceError(
            "{folder} has {free:.2f} GiB free; the job and 1 GiB to spare need {needed:.2f} GiB",
            folder=home.path,
            free=free / 2**30,
            needed=needed / 2**30,
            hint="free some space, then join again",
        )


def _new_rows(doing: _Doing) -> Iterator[tuple[Row, ...]]:
    """Whole lines that have been written since the last time."""
    path = doing.run.path / METRICS
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(doing.read_bytes)
        news = file.read()
    whole = news[: news.rfind(b"\n") + 1]
    doing.read_bytes += len(whole)
    rows = [row for line in whole.decode(errors="replace").splitlines() if (row := usable_row(line)) is not None]
    for first in range(0, len(rows), MAX_ROWS):
        yield tuple(rows[first : first + MAX_ROWS])
