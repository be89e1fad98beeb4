"""Where jobs are done by the machines of a crew: each worker that has joined is a place, one job after the other.

A machine gets a job's run file, what it needs by hash, and what another machine has left of it: rows and the newest
checkpoint. It sends rows and checkpoints back as they come, so that nothing but the work since the last checkpoint is
lost with it.

Invariants
* Who does a job decides: rows, files and the end of a job are taken from nobody else, and only while it has it.
* What a machine brings counts after it was verified: a checkpoint's files by its manifest, its version by the job.
* A job's run takes no more disk here than `MOST_COPIES` of its checkpoints and the rows of its steps.
* A machine that has gone, or is silent for `SILENT_SECONDS`, is no failure of its job, unless that happens again and
  again: another machine goes on.
"""

import json
import logging
import queue
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic

from cuadrilla.config import Config
from cuadrilla.engines.bundle import offer
from cuadrilla.engines.crew import OpenCrew
from cuadrilla.errors import CheckpointError, ConfigError, LinkError
from cuadrilla.home import Home
from cuadrilla.jobs.places import J, Left
from cuadrilla.link.address import Address
from cuadrilla.link.base import PAUSED, Goodbye, Hello, NodeReport, Progress, Stop, ToCoordinator
from cuadrilla.link.gate import bind
from cuadrilla.link.grpc_server import CrewServer
from cuadrilla.link.grpc_standby import CHECKPOINT_FILE
from cuadrilla.link.jobs import COMPLETE, FAILED, JOB_NAME, METRICS, Assignment, JobNews, Recall, Row
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.offer import Offer, OfferedFile
from cuadrilla.link.tls import key_hash, open_coordinator
from cuadrilla.link.wire import Layout
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, append_event, file_sha256, make_private, open_private, storage_errors, write_json
from cuadrilla.runfile import read_run_file
from cuadrilla.train.checkpoint import list_checkpoints, prune_checkpoints, verify_checkpoint, version_of
from cuadrilla.train.nodelog import NodeLogs
from cuadrilla.train.setup import make_model, make_task
from cuadrilla.train.teachers import keep_teachers

SILENT_SECONDS = 10.0
MAX_LOSSES = 10
"""Of machines that have one job: then it counts as failed."""
MOST_COPIES = 4
BYTES_PER_PARAMETER, MORE_BYTES = 24, 64 * 2**20
"""Of a checkpoint, at most: weights, what an optimizer keeps of each, and what does not grow with them."""
MAX_STEPS_OVER = 10

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Place:
    """A worker that has joined."""

    name: str
    heard_at: float


@dataclass(kw_only=True)
class _Given(Generic[J]):
    """A job that a machine has now."""

    job: J
    run: RunDir
    began: float
    keep: int
    keep_steps: frozenset[int]
    steps: int
    """No version is above it; 0: nobody knows."""
    most_bytes: int
    """Of a checkpoint's files."""
    files: Mapping[str, Path]
    """By hash: what its machine may have."""
    announced: Counter[str] = field(default_factory=Counter)
    """Bytes of the files that have been sent, by checkpoint."""

    @property
    def incoming(self) -> Path:
        return self.run.path / ".incoming"


class CrewPlaces(Generic[J]):
    """The machines of this machine's crew, for as long as `server` runs. Used by one thread; a `Receiver` and a
    `JobReceiver` for those of the link."""

    def __init__(self, *, home: Home, folder: Path) -> None:
        """`folder`: of what the jobs belong to, a run directory as far as it has machines."""
        self._home = home
        self._run = RunDir(folder)
        self._logs = NodeLogs(self._run.nodes)
        self.server: CrewServer | None = None
        self._heard: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._present: dict[str, _Place] = {}
        self._given: dict[str, _Given[J]] = {}
        self._left: list[Left[J]] = []
        self._losses: Counter[str] = Counter()
        self._stopping = False

    # -- Doing ---------------------------------------------------------------------------------------------------------

    @property
    def places(self) -> Sequence[str]:
        return sorted(self._present)

    @property
    def free(self) -> list[str]:
        return [name for name in self.places if name not in self._given]

    @property
    def busy(self) -> dict[str, J]:
        return {name: given.job for name, given in self._given.items()}

    def start(self, job: J, run: RunDir, *, name: str) -> None:
        """Raises ConfigError for a run that cannot go to another machine, DataError, TaskError, ResourceError."""
        assert self.server is not None
        assert JOB_NAME.fullmatch(job.name), job.name
        config = read_run_file(run.run_file).config
        require_portable(config)
        task = make_task(config, run.path)
        keep_teachers(config, run, task=task)
        offered = offer(config, run.path)
        begun = _begun(run)
        model_parameters = sum(each.numel() for each in make_model(task, seed=config.run.seed).parameters())
        shutil.rmtree(run.path / ".incoming", ignore_errors=True)
        everything = [*offered.files.values(), *begun.values()]
        self._given[name] = _Given(
            job=job,
            run=run,
            began=time.monotonic(),
            keep=config.checkpoint.keep,
            keep_steps=frozenset(config.checkpoint.keep_steps),
            steps=config.train.steps,
            most_bytes=BYTES_PER_PARAMETER * model_parameters + MORE_BYTES,
            files={sha256.hex(): path for path, sha256 in everything},
        )
        order = Assignment(
            job=job.name, config=offered.config, files=_described(offered.files), begun=_described(begun)
        )
        self.server.order(name, order)

    def look(self) -> list[Left[J]]:
        """Who has ended since. Raises LinkError, ResourceError."""
        assert self.server is not None
        while not self._heard.empty():
            self._heard.get()()
        paused = self._home.paused_nodes
        self.server.end_kicked()
        self.server.adopt_invites(self._home.take_invites())
        self.server.pause(paused)
        now = time.monotonic()
        for place in list(self._present.values()):
            if now - place.heard_at > SILENT_SECONDS:
                reason = Message("nothing heard for {seconds:g} s", seconds=SILENT_SECONDS)
                self.server.send(place.name, Stop(reason=reason, again=True))
                self._gone(place.name, reason)
        left, self._left = self._left, []
        return left

    def stop(self) -> None:
        """Have all save and give back; `look` tells of them."""
        assert self.server is not None
        self._stopping = True
        for name, given in self._given.items():
            self.server.order(name, Recall(job=given.job.name))

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    # -- from the threads of the link ----------------------------------------------------------------------------------

    def deliver(self, worker: str, message: ToCoordinator) -> None:
        if isinstance(message, Hello):
            self._heard.put(lambda: self._join(worker))
        elif isinstance(message, Goodbye):
            self._heard.put(lambda: self._gone(worker, message.reason))

    def heard(self, worker: str, _progress: Progress) -> None:
        self.alive(worker)

    def alive(self, worker: str) -> None:
        place = self._present.get(worker)
        if place is not None:
            place.heard_at = time.monotonic()

    def reported(self, worker: str, report: NodeReport) -> None:
        self._logs.report(worker, report)

    def left(self, worker: str, reason: str) -> None:
        self._heard.put(lambda: self._gone(worker, reason))

    def news(self, worker: str, news: JobNews) -> None:
        self.alive(worker)
        self._heard.put(lambda: self._take(worker, news))

    def place_for(self, worker: str, name: str, *, num_bytes: int) -> Path:
        """Raises LinkError."""
        given = self._given.get(worker)
        job, _, path = name.partition("/")
        match = CHECKPOINT_FILE.fullmatch(path)
        if given is None or given.job.name != job or match is None or not _is_version(int(match[1]), given):
            raise LinkError("nobody wants that file", hint="install the same version there")
        checkpoint = f"v{int(match[1]):08d}"
        waiting = set(given.announced) | {checkpoint}
        given.announced[checkpoint] += num_bytes
        if given.announced[checkpoint] > 2 * given.most_bytes or len(waiting) > MOST_COPIES:
            raise LinkError("its checkpoints are larger than those of its model", hint="install the same version there")
        return given.incoming / checkpoint / match[2]

    def file(self, sha256: str) -> Path | None:
        found = [given.files[sha256] for given in list(self._given.values()) if sha256 in given.files]
        return found[0] if found else None

    # -- one thing after the other -------------------------------------------------------------------------------------

    def _join(self, worker: str) -> None:
        self._gone(worker, Message("it has joined anew"))
        self._present[worker] = _Place(name=worker, heard_at=time.monotonic())
        append_event(self._run.events, "joined", worker=worker)

    def _gone(self, worker: str, reason: str) -> None:
        if self._present.pop(worker, None) is None:
            return
        append_event(self._run.events, "left", worker=worker, reason=reason)
        given = self._given.get(worker)
        if given is None:
            return
        log.info("%s is gone (%s): another machine goes on with %s", worker, reason, given.job.name, extra=TALK)
        self._losses[given.job.name] += reason != PAUSED
        lost = self._losses[given.job.name] >= MAX_LOSSES
        told = Message("{number} machines were lost during this job", number=MAX_LOSSES) if lost else Message("")
        self._end(worker, given, complete=False, reason=told)

    def _take(self, worker: str, news: JobNews) -> None:
        """Raises ResourceError."""
        given = self._given.get(worker)
        if given is None or given.job.name != news.job:
            return
        rows = [row for row in news.rows if _is_version(int(row["version"]), given)]
        _append(given.run.metrics, rows)
        if rows:
            write_json(given.run.status, {"state": "running", "version": int(rows[-1]["version"])}, private=True)
        if news.kept:
            self._adopt(worker, news.kept, given)
        if news.ended:
            self._end(worker, given, complete=news.ended == COMPLETE, reason=_why(news))

    def _adopt(self, worker: str, version: int, given: _Given[J]) -> None:
        """A checkpoint that has come as a whole becomes one of the run."""
        name = f"v{version:08d}"
        arrived, target = given.incoming / name, given.run.checkpoints / name
        given.announced.pop(name, None)
        try:
            verify_checkpoint(arrived)
        except CheckpointError as error:
            log.warning("a checkpoint from %s cannot be used: %s", worker, error.message)
            shutil.rmtree(arrived, ignore_errors=True)
            return
        with storage_errors(target):
            make_private(given.run.checkpoints)
            if target.exists():
                shutil.rmtree(target)
            arrived.rename(target)
        prune_checkpoints(given.run.checkpoints, keep=given.keep, protect=given.keep_steps)

    def _end(self, worker: str, given: _Given[J], *, complete: bool, reason: str) -> None:
        del self._given[worker]
        shutil.rmtree(given.incoming, ignore_errors=True)
        state = "complete" if complete else "stopped"
        version = max((version_of(path) for path in list_checkpoints(given.run.checkpoints)), default=0)
        write_json(given.run.status, {"state": state, "version": version}, private=True)
        seconds = time.monotonic() - given.began
        self._left.append(Left(job=given.job, place=worker, complete=complete, seconds=seconds, reason=reason))


@contextmanager
def open_crew_places(home: Home, *, listen: Address, folder: Path) -> "Iterator[tuple[CrewPlaces[J], OpenCrew]]":
    """This machine's crew, for machines that join to do jobs; closed behind the block. `folder`: what happens there is
    written down. Raises LinkError.
    """
    keys, nodes = open_coordinator(home.crew, now=datetime.now(UTC)), AllowList(home.nodes)
    places: CrewPlaces[J] = CrewPlaces(home=home, folder=folder)
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
    places.server = server
    try:
        port = server.serve(bind(str(listen)))
        address = str(Address(listen.host, port))
        yield places, OpenCrew(address=address, key_hash=key_hash(keys.identity.certificate), pids={})
    finally:
        places.close()


def require_portable(config: Config) -> None:
    """Raises ConfigError for a run that only this machine can do."""
    if config.model.init:
        raise ConfigError(
            "a run that begins from model.init = {init} is not given to other machines",
            init=config.model.init,
            hint="without other machines: leave --crew out",
        )


def _why(news: JobNews) -> str:
    if news.ended != FAILED:
        return Message("")
    return news.reason or Message("it says not why")


def _is_version(version: int, given: _Given[J]) -> bool:
    return 0 <= version <= (given.steps or version)


def _begun(run: RunDir) -> dict[str, tuple[Path, bytes]]:
    """What another machine needs to go on: the rows, and the newest checkpoint that verifies."""
    found = {}
    for path in reversed(list_checkpoints(run.checkpoints)):
        try:
            verify_checkpoint(path)
        except CheckpointError:
            continue
        found = {f"checkpoints/{path.name}/{file.name}": file for file in sorted(path.iterdir())}
        break
    if run.metrics.exists():
        found[METRICS] = run.metrics
    return {name: (path, bytes.fromhex(file_sha256(path))) for name, path in found.items()}


def _described(files: Mapping[str, tuple[Path, bytes]]) -> tuple[OfferedFile, ...]:
    return tuple(
        OfferedFile(path=name, sha256=sha256, num_bytes=path.stat().st_size) for name, (path, sha256) in files.items()
    )


def _append(path: Path, rows: Sequence[Row]) -> None:
    if rows:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with storage_errors(path), open(path, "a", encoding="utf-8", opener=open_private) as file:
            file.write(text)
