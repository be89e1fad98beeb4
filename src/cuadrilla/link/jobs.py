"""Jobs over the crew link, whole runs and calls of a function: what a machine is given to do by itself, and what it
says of it.

Nothing that it says is believed: of its rows and figures numbers are kept and nothing else. Its files come by
`grpc_jobs.py`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import ToWorker
from cuadrilla.link.names import JOB_NAME
from cuadrilla.link.offer import OfferedFile, RunDescription, Session
from cuadrilla.link.wire import Layout
from cuadrilla.messages import Message
from cuadrilla.printable import one_line
from cuadrilla.rundir import finite_json

COMPLETE, GIVEN_BACK, FAILED = "complete", "given back", "failed"
ENDS = ("", COMPLETE, GIVEN_BACK, FAILED)
METRICS = "metrics.jsonl"
DEVICE = "device"
"""In the environment of a Hello: of which kind a place's device is."""
ROW_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
CHECKPOINT_FILE = re.compile(
    r"checkpoints/v([0-9]{8,12})/(model\.safetensors|optimizer\.safetensors|state\.json|manifest\.json)"
)
"""One name for each: no digits of other scripts, and no number that takes a minute to read."""
TALK_FILE = "logs/talk.txt"
"""Of a call: what it printed."""
MAX_ROWS, MAX_ROW_CHARACTERS, MAX_ROW_KEYS = 500, 4096, 100
MAX_FIGURES, MAX_FIGURE_NAME, MAX_FIGURES_CHARACTERS = 101, 80, 2**15
"""Of a call: what it may return, and its seconds."""
MAX_VERSION, MAX_WHOLE, MAX_NUMBER = 10**12 - 1, 2**63, 1e300

Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A run that one machine trains by itself. `config`: JSON of its configuration; `files`: what it needs beside it;
    `begun`: what somebody else has left of it, relative to the run directory. Or the call of a function in one of
    `files`: then `call` says which, and with what, as JSON, and there is no more."""

    job: str
    config: str = ""
    files: tuple[OfferedFile, ...]
    begun: tuple[OfferedFile, ...] = ()
    call: str = ""


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Save, and give the job back."""

    job: str


Order = Assignment | Recall


@dataclass(frozen=True, kw_only=True)
class JobNews:
    """How it goes on with a job. `rows`: of its metrics, in their order. `kept`: a checkpoint of this version has been
    sent, every file of it; 0: none. `ended`: one of `ENDS`. `reason`: why it failed. `figures`: what a call gave."""

    job: str
    rows: tuple[Row, ...] = ()
    kept: int = 0
    ended: str = ""
    reason: str = ""
    figures: Row = field(default_factory=dict)


class JobSession(Session, Protocol):
    """A session that carries orders, and news of jobs."""

    def tell(self, news: JobNews) -> None:
        """How it goes on with a job. Raises LinkError when the session has broken."""

    def keep(self, name: str, path: Path) -> None:
        """Send a file of a job's run, by the name of the job and its own in the run. Raises LinkError."""

    def next_order(self, *, timeout_seconds: float) -> Order | None:
        """What to do next, if something comes in time."""


class JobConnection(Protocol):
    """A machine's way to who gives jobs away, whatever carries it. All methods raise LinkError."""

    def describe(self) -> RunDescription: ...

    def fetch(self, file: OfferedFile, *, to: Path) -> None:
        """Download a file and check its hash."""

    def session(self, *, parameters: Layout) -> JobSession: ...

    def close(self) -> None: ...


class JobServer(Protocol):
    """The other end, whatever carries it."""

    def order(self, worker: str, order: Order) -> None:
        """Put an order on its way; a worker that has not joined gets nothing."""

    def send(self, worker: str, message: ToWorker) -> None: ...

    def end_kicked(self) -> None:
        """Send home who may not work any more."""

    def adopt_invites(self, invites: Mapping[bytes, int]) -> None: ...

    def pause(self, nodes: frozenset[str]) -> None:
        """These are to wait, and no others."""

    def close(self) -> None: ...


class JobReceiver(Protocol):
    """Who has given jobs away. Called from the threads of the link."""

    def news(self, worker: str, news: JobNews) -> None: ...

    def place_for(self, worker: str, name: str, *, num_bytes: int) -> Path:
        """Where a file of a worker's job is to lie. Raises LinkError where it is not wanted."""

    def goes_on(self, worker: str, place: Path) -> None:
        """A part of that file has come: on a slow line heartbeats wait behind it. Raises LinkError where it is not
        wanted any more."""

    def file(self, sha256: str) -> Path | None:
        """One that the workers of jobs may have, by its hash in hexadecimal."""


def order_to_wire(order: Order) -> pb.ToWorker:
    if isinstance(order, Recall):
        return pb.ToWorker(recall=pb.Recall(job=order.job))
    files, begun = _files_to_wire(order.files), _files_to_wire(order.begun)
    return pb.ToWorker(
        assignment=pb.Assignment(job=order.job, config=order.config, files=files, begun=begun, call=order.call)
    )


def order_from_wire(received: pb.ToWorker) -> Order | None:
    """None: it is another kind of message. Raises LinkError for names that no job has, and for files that are not the
    rows and one checkpoint."""
    match received.WhichOneof("kind"):
        case "recall":
            return Recall(job=_job(received.recall.job))
        case "assignment":
            said = received.assignment
            begun = files_from_wire(said.begun)
            names = [file.path for file in begun]
            of = {match and match[1] for name in names if (match := CHECKPOINT_FILE.fullmatch(name)) or name != METRICS}
            if None in of or len(of) > 1 or len(set(names)) < len(names) or (said.call and begun):
                raise _nonsense(Message("files that no run has"))
            files = files_from_wire(said.files)
            return Assignment(job=_job(said.job), config=said.config, files=files, begun=begun, call=said.call)
    return None


def news_to_wire(news: JobNews) -> pb.ToCoordinator:
    rows, figures = [json.dumps(row) for row in news.rows], json.dumps(news.figures) if news.figures else ""
    said = pb.JobNews(job=news.job, rows=rows, kept=news.kept, ended=news.ended, reason=news.reason, figures=figures)
    return pb.ToCoordinator(job_news=said)


def news_from_wire(said: pb.JobNews) -> JobNews:
    """Raises LinkError for nonsense."""
    if said.ended not in ENDS or len(said.rows) > MAX_ROWS or said.kept > MAX_VERSION:
        raise _nonsense(Message("no news of a job"))
    rows = tuple(row for text in said.rows if (row := usable_row(text)) is not None)
    reason, figures = one_line(said.reason, most=wire.MAX_REASON), usable_figures(said.figures)
    return JobNews(
        job=_job(said.job), rows=rows, kept=said.kept, ended=said.ended, reason=reason, figures=figures or {}
    )


def usable_row(text: str) -> Row | None:
    """The numbers of a line of metrics.jsonl; None if it is none."""
    found = parse_object(text, most_characters=MAX_ROW_CHARACTERS)
    if found is None or len(found) > MAX_ROW_KEYS:
        return None
    row = {key: value for key, value in found.items() if ROW_KEY.fullmatch(key) and _is_number(value)}
    version = row.get("version")
    return row if isinstance(version, int) and 0 <= version <= MAX_VERSION else None


def usable_figures(text: str) -> Row | None:
    """What a call gave, numbers by name; None if it is not that."""
    found = parse_object(text, most_characters=MAX_FIGURES_CHARACTERS)
    if found is None or len(found) > MAX_FIGURES:
        return None
    usable = (name == one_line(name, most=MAX_FIGURE_NAME) and _is_number(value) for name, value in found.items())
    return found if all(usable) else None


def parse_object(text: str, *, most_characters: int) -> dict[str, Any] | None:
    """Of JSON from another machine, without NaN and infinities; None if it is anything else, or longer."""
    if len(text) > most_characters:
        return None
    try:
        found = finite_json(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_number(value: object) -> bool:
    """Of a size that other programs read, too, and that can be added up."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < (MAX_WHOLE if isinstance(value, int) else MAX_NUMBER)


def files_from_wire(files: Iterable[pb.File]) -> tuple[OfferedFile, ...]:
    return tuple(OfferedFile(path=file.path, sha256=file.sha256, num_bytes=file.num_bytes) for file in files)


def _files_to_wire(files: Iterable[OfferedFile]) -> list[pb.File]:
    return [pb.File(path=file.path, sha256=file.sha256, num_bytes=file.num_bytes) for file in files]


def _job(name: str) -> str:
    if not JOB_NAME.fullmatch(name):
        raise _nonsense(Message("a name that no job has"))
    return name


def _nonsense(problem: Message) -> LinkError:
    told = "a message cannot be used: {problem}"
    return LinkError(told, problem=problem, hint="install the same version on both machines")


def named_chunks(name: str, path: Path) -> Iterator[pb.Chunk]:
    """A file; the first chunk says under which name it is sent. Raises OSError."""
    for number, chunk in enumerate(wire.file_chunks(path, 0)):
        if number == 0:
            chunk.name = name
        yield chunk
