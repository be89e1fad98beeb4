"""Machines of a crew that takes jobs, lent to a run of several: who sees it, who speaks in it, who comes back."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cuadrilla.engines import lent
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.jobs.crew import CrewPlaces, open_crew_places
from cuadrilla.jobs.places import Left
from cuadrilla.jobs.together import LentRuns
from cuadrilla.link.address import Address
from cuadrilla.link.base import Hello, Lease, Stop, Version
from cuadrilla.link.grpc_client import Connection, GrpcLink
from cuadrilla.link.jobs import COMPLETE, JobNews
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.tls import open_coordinator
from cuadrilla.link.wire import Layout
from cuadrilla.model.task import load_task
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.sync.exact import contribution_like
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.loop import environment
from cuadrilla.train.thread import TICK_SECONDS
from tests.crews import NOW, join
from tests.hostile import wait_for
from tests.runs import RUN_FILE, prepare
from tests.tasks import RaggedRegression


@dataclass(frozen=True)
class Named:
    """A job."""

    name: str


class Crew:
    """A coordinator, whose one thread is the test's."""

    def __init__(self, folder: Path, places: "CrewPlaces[Named]", *, address: str, home: Home) -> None:
        self.folder, self.places, self.address, self.home = folder, places, address, home
        self.lent: LentRuns[Named] = LentRuns(places)
        self.left: list[Left[Named]] = []
        self.connections: dict[str, Connection] = {}
        self.sessions: list[GrpcLink] = []

    def connection(self, name: str) -> Connection:
        if name not in self.connections:
            keys = open_coordinator(self.home.crew, now=NOW)
            identity = join(self.folder / "nodes" / name, name=name, crew=keys)
            AllowList(self.home.nodes).add(name, certificate=identity.certificate)
            self.connections[name] = Connection(self.address, identity=identity)
        return self.connections[name]

    def session(self, name: str, *, parameters: Layout, says: dict[str, str]) -> GrpcLink:
        session = self.connection(name).session(parameters=parameters)
        self.sessions.append(session)
        session.call(Hello(speed_hint=1.0, environment=says))
        return session

    def joins(self, name: str) -> GrpcLink:
        """As a machine that takes jobs."""
        assert self.connection(name).describe().takes_jobs
        session = self.session(name, parameters=Layout(()), says={})
        self.until(lambda: name in self.places.places)
        return session

    def lends(self, job: str, *names: str) -> RunDir:
        run = written(self.folder / "runs" / job, "from tests.tasks import RaggedRegression as task")
        self.lent.start(Named(job), run, machines=names, here=())
        self.until(lambda: all(self.connection(name).describe().run == job for name in names))
        return run

    def until(self, condition: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.places.look()
            self.left += self.lent.look()
            return condition()

        wait_for(looked)


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    home = Home(tmp_path / "home")
    with open_crew_places(home, listen=Address("127.0.0.1", 0), folder=tmp_path) as (places, opened):
        made = Crew(tmp_path, places, address=opened.address, home=home)
        yield made
        made.lent.stop()
        for session in made.sessions:
            session.close()
        made.until(lambda: not made.lent.machines)
        for connection in made.connections.values():
            connection.close()


@dataclass(frozen=True)
class AsWorker:
    """What a worker of such a run says of itself, and what a version looks like."""

    says: dict[str, str]
    parameters: Layout


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> AsWorker:
    context = prepare(tmp_path_factory.mktemp("worker"), RaggedRegression())
    says = {**code_fingerprint(context.task, context.model), **environment(context.device)}
    layout = Layout.of(context.strategy.version_like(context.model))
    assert contribution_like(context.model, strict=False)
    context.store.close()
    return AsWorker(says=says, parameters=layout)


def takes_part(crew: Crew, name: str, worker: AsWorker) -> GrpcLink:
    crew.connection(name).describe()
    return crew.session(name, parameters=worker.parameters, says=worker.says)


def first(session: GrpcLink, kind: type[Any]) -> Any:
    """The first event of a kind; a Stop ends the wait."""
    while not isinstance(event := session.next_event(), kind):
        assert not isinstance(event, Stop), event.reason
    return event


def test_who_is_lent_leaves_its_session_and_comes_back(crew: Crew, worker: AsWorker) -> None:
    ana, luis = crew.joins("ana"), crew.joins("luis")
    run = crew.lends("juntos", "ana", "luis")
    for session in (ana, luis):
        stop = session.next_event()
        assert isinstance(stop, Stop)
        assert (stop.again, stop.refused) == (True, False)
    crew.until(lambda: not crew.places.places)
    working = [takes_part(crew, name, worker) for name in ("ana", "luis")]
    assert [first(session, Lease).version for session in working] == [0, 0]
    crew.lent.stop()
    for session in working:
        stop = first(session, Stop)
        assert stop.again, "there may be other work for it"
    crew.until(lambda: bool(crew.left))
    [left] = crew.left
    assert (left.complete, left.reason, left.place) == (False, "", "ana, luis")
    assert crew.joins("ana").next_order(timeout_seconds=0) is None
    assert {row["worker"] for row in read_jsonl(run.events) if row["event"] == "joined"} == {"ana", "luis"}


def test_others_see_nothing_of_it(crew: Crew, worker: AsWorker) -> None:
    """Not its files, not its weights; and it hears nothing of them."""
    crew.joins("eva")
    run = crew.lends("juntos", "ana", "luis")
    takes_part(crew, "ana", worker)
    session = takes_part(crew, "luis", worker)
    version = first(session, Version)
    assert session.download(version.parameters)
    [code] = crew.connection("ana").describe().files
    crew.connection("ana").fetch(code, to=crew.folder / "fetched.py")
    assert (crew.folder / "fetched.py").read_bytes() == (run.path / "task.py").read_bytes()
    eva = crew.connection("eva")
    with pytest.raises(LinkError, match="there is no"):
        eva.fetch(code, to=crew.folder / "stolen.py")
    with pytest.raises(LinkError, match="there is no"):
        eva.download(str(version.parameters), worker.parameters)
    assert eva.describe().run == ""
    assert crew.places.places == ["eva"]


def test_who_was_told_something_else_asks_again(crew: Crew, worker: AsWorker) -> None:
    """Between the question and the session its machine was lent, or taken back: nobody else hears its Hello."""
    crew.connection("ana").describe()
    run = crew.lends("juntos", "ana", "luis")
    late = Connection(crew.address, identity=crew.connection("ana").identity)
    session = late.session(parameters=Layout(()))
    with pytest.raises(LinkError, match="other work"):
        session.next_event()
    session.close()
    late.close()
    assert not [row for row in read_jsonl(run.events) if row["event"] in ("joined", "refused")]
    assert takes_part(crew, "ana", worker).next_event() is not None


def test_a_lent_machine_has_no_jobs_to_speak_of(crew: Crew, worker: AsWorker) -> None:
    crew.lends("juntos", "ana", "luis")
    session = takes_part(crew, "ana", worker)
    session.tell(JobNews(job="juntos", ended=COMPLETE))
    stop = first(session, Stop)
    assert stop.refused
    assert not crew.left


def test_what_all_have_left_is_given_back(crew: Crew, worker: AsWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "ABANDONED_SECONDS", 0.5)
    crew.lends("juntos", "ana", "luis")
    session = takes_part(crew, "ana", worker)
    seen = time.monotonic() + 10 * TICK_SECONDS
    crew.until(lambda: time.monotonic() > seen)
    session.close()
    crew.until(lambda: bool(crew.left))
    [left] = crew.left
    assert (left.complete, left.reason) == (False, "")
    assert crew.connection("ana").describe().takes_jobs


def test_what_nobody_comes_to_fails(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have much to fetch; but not for ever."""
    monkeypatch.setattr(lent, "ABANDONED_SECONDS", 0.1)
    monkeypatch.setattr(lent, "COMING_SECONDS", 1.0)
    crew.lends("juntos", "ana", "luis")
    crew.until(lambda: bool(crew.left))
    [left] = crew.left
    assert "none of its machines has come" in left.reason
    assert crew.connection("ana").describe().takes_jobs


@pytest.mark.parametrize("code", ["raise OSError('the disk is gone')", "raise SystemExit('the disk is gone')"])
def test_a_run_that_fails_gives_its_machines_back(crew: Crew, code: str) -> None:
    crew.lent.start(Named("mal"), written(crew.folder / "runs" / "mal", code), machines=("ana",), here=())
    crew.until(lambda: bool(crew.left))
    [left] = crew.left
    assert "the disk is gone" in left.reason
    assert crew.connection("ana").describe().takes_jobs


def test_two_runs_at_once_are_what_they_would_be_alone(crew: Crew) -> None:
    """Their files have one name, and so have the modules beside them; both draw their first weights at once."""
    runs = {}
    for name, width in (("uno", 16), ("dos", 24)):
        code = "import beside\nfrom tests.tasks import RaggedRegression\ntask = RaggedRegression(width=beside.WIDTH)"
        runs[name] = written(crew.folder / "runs" / name, code)
        (runs[name].path / "beside.py").write_text(f"WIDTH = {width}\n")
        crew.lent.start(Named(name), runs[name], machines=(f"{name}-1",), here=())
    crew.until(lambda: all(crew.connection(f"{name}-1").describe().run == name for name in runs))
    for name, width in (("uno", 16), ("dos", 24)):
        context = prepare(crew.folder / name, RaggedRegression(width=width))
        description = crew.connection(f"{name}-1").describe()
        assert {file.path for file in description.files} == {"task.py", "beside.py"}
        says = {**code_fingerprint(context.task, context.model), **environment(context.device)}
        says["model code"] = hashed_code(runs[name].path / "task.py")
        layout = Layout.of(context.strategy.version_like(context.model))
        session = crew.session(f"{name}-1", parameters=layout, says=says)
        weights = session.download(first(session, Version).parameters)
        assert all(torch.equal(weights[key], tensor) for key, tensor in context.model.state_dict().items())
        context.store.close()


def written(folder: Path, code: str) -> RunDir:
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(f"{code}\n")
    (folder / "run.toml").write_text(RUN_FILE)
    return RunDir(folder)


def hashed_code(path: Path) -> str:
    """As a worker says it whose task is in this file."""
    found = code_fingerprint(load_task(f"{path.name}:task", folder=path.parent), torch.nn.Linear(1, 1))
    return found["model code"]


def test_a_machine_that_is_paused_or_kicked_is_told_so_in_its_run_too(crew: Crew, worker: AsWorker) -> None:
    crew.lends("juntos", "ana", "luis")
    ana, luis = (takes_part(crew, name, worker) for name in ("ana", "luis"))
    assert crew.places.server is not None
    crew.places.server.pause(frozenset({"ana"}))
    assert first(ana, Stop).again
    AllowList(crew.home.nodes).remove("luis")
    crew.places.server.end_kicked()
    assert first(luis, Stop).refused
