"""Whole runs over a real crew link, on honest and on lying machines."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.crew.run import train_run
from cuadrilla.errors import ResourceError
from cuadrilla.home import Home
from cuadrilla.jobs.crew import CrewExecutor
from cuadrilla.jobs.executor import Ended
from cuadrilla.link.address import Address
from cuadrilla.link.base import Hello
from cuadrilla.link.client import Connection
from cuadrilla.link.jobs import Assignment, CheckpointFile, JobNews
from cuadrilla.link.wire import file_chunks
from cuadrilla.rundir import RunDir, read_jsonl, read_object, write_json
from cuadrilla.runfile import read_run_file
from cuadrilla.train.checkpoint import FILES, MANIFEST, list_checkpoints, version_of
from tests.commands import wait_for
from tests.hostile import CEILING_SECONDS
from tests.runs import RUN_FILE

NAMES = (*FILES, MANIFEST)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that was trained as a machine would train it. Read only."""
    run = RunDir(tmp_path_factory.mktemp("trained"))
    write_run(run)
    settings = ["checkpoint.every_steps=2", "checkpoint.keep=9", "evaluate.sequences=8"]
    assert train_run(read_run_file(run.path, sets=settings), run).complete
    return run


def write_run(run: RunDir) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    (run.path / "task.py").write_text("from tests.tasks import RaggedRegression as task\n\n__all__ = ['task']\n")
    run.run_file.write_text(RUN_FILE)


class Machine:
    """A machine that has joined. It sends files of the run `trained`, changed or not."""

    def __init__(self, crew: "Jobs", name: str, trained: RunDir) -> None:
        self.crew, self.name, self._trained = crew, name, trained
        server = crew.executor.crew
        self.connection = Connection(server.address, identity=server.admit(name))
        self.session = self.connection.session(parameters=())
        self.session.call(Hello(speed_hint=1.0))
        crew.until(lambda: name in crew.executor.places)

    def send(self, job: str, version: int, *, change: Callable[[Path], None] | None = None) -> None:
        """Send a checkpoint."""
        folder = self.crew.folder / "sent" / self.name / f"v{version:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._trained.checkpoints / folder.name, folder)
        if change is not None:
            change(folder)
        for name in NAMES:
            file = CheckpointFile(job=job, path=f"checkpoints/{folder.name}/{name}")
            list(self.connection.ask(file, file_chunks(folder / name)))

    def rows(self, job: str, *, to: int) -> JobNews:
        rows = [row for row in read_jsonl(self._trained.metrics) if row["version"] <= to]
        return JobNews(job=job, rows="".join(json.dumps(row) + "\n" for row in rows))

    def close(self) -> None:
        self.session.close()
        self.connection.close()


class Jobs:
    """A coordinator that assigns jobs, and the machines of a test."""

    def __init__(self, folder: Path, executor: CrewExecutor, *, trained: RunDir) -> None:
        self.folder, self.executor, self._trained = folder, executor, trained
        self.left: list[Ended] = []
        self.machines: list[Machine] = []

    def joins(self, name: str) -> Machine:
        self.machines.append(Machine(self, name, self._trained))
        return self.machines[-1]

    def until(self, condition: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.left += self.executor.poll()
            return condition()

        wait_for(looked)

    def gives(self, job: str, machine: Machine) -> Assignment:
        """Assign a job to a machine, as soon as that machine is free."""
        self.until(lambda: self.executor.places.get(machine.name) == "")
        run = self.run(job)
        if not run.run_file.exists():
            write_run(run)
        self.executor.start(job, run, place=machine.name)
        order = machine.session.next_event(seconds=CEILING_SECONDS)
        assert isinstance(order, Assignment)
        assert order.job == job
        return order

    def run(self, job: str) -> RunDir:
        return RunDir(self.folder / "runs" / job)

    def ends(self) -> Ended:
        self.until(lambda: bool(self.left))
        return self.left.pop(0)

    def versions(self, job: str) -> list[int]:
        return [version_of(path) for path in list_checkpoints(self.run(job).checkpoints)]


@pytest.fixture
def crew(tmp_path: Path, trained: RunDir) -> Iterator[Jobs]:
    home = Home(tmp_path / "home")
    with contextlib.closing(CrewExecutor(home, listen=Address("127.0.0.1", 0), folder=tmp_path)) as executor:
        made = Jobs(tmp_path, executor, trained=trained)
        yield made
        for machine in made.machines:
            machine.close()


def test_another_machine_goes_on_from_what_the_first_has_sent(crew: Jobs) -> None:
    ana, luis = crew.joins("ana"), crew.joins("luis")
    crew.gives("0000-0", ana)
    ana.session.call(ana.rows("0000-0", to=5))
    ana.send("0000-0", 4)
    crew.until(lambda: crew.versions("0000-0") == [4])
    ana.close()
    assert crew.ends().lost
    order = crew.gives("0000-0", luis)
    assert {file.path for file in order.begun} == {
        "metrics.jsonl",
        *(f"checkpoints/v00000004/{name}" for name in NAMES),
    }
    for file in order.begun:
        luis.connection.fetch(file, to=crew.folder / "fetched")
        assert hashlib.sha256((crew.folder / "fetched").read_bytes()).hexdigest() == file.sha256


def test_a_full_disk_ends_no_job_and_loses_no_row(crew: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **_more: object) -> None:
        raise ResourceError("no space left for {path}", path=path, hint="free some")

    ana, rows = crew.joins("ana"), crew.run("0000-0").metrics
    crew.gives("0000-0", ana)
    with monkeypatch.context() as full:
        full.setattr("cuadrilla.rundir.append_lines", refuse)
        full.setattr("cuadrilla.jobs.crew.write_json", refuse)
        ana.session.call(JobNews(job="0000-0", rows='{"version": 1, "loss": 2.0}\n'))
        crew.joins("luis")
    ana.session.call(JobNews(job="0000-0", rows='{"version": 2, "loss": 1.0}\n', ended=True, complete=True))
    assert crew.ends().complete
    assert [row["version"] for row in read_jsonl(rows)] == [1, 2]
    events = [row["event"] for row in read_jsonl(crew.folder / "events.jsonl")]
    assert events == ["joined", "assigned", "joined", "returned"]


# Lies


def bit_flip(folder: Path) -> None:
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "model.safetensors").write_bytes(raw)


def test_checkpoints_that_are_none_count_as_nothing(crew: Jobs) -> None:
    """Invalid checkpoints are dropped, whatever they contain, and the coordinator goes on."""
    mala = crew.joins("mala")
    crew.gives("0000-0", mala)
    mala.send("0000-0", 2)
    crew.until(lambda: crew.versions("0000-0") == [2])
    mala.send("0000-0", 4, change=bit_flip)
    mala.send("0000-0", 8)
    crew.until(lambda: 8 in crew.versions("0000-0"))
    assert crew.versions("0000-0") == [2, 8]


@pytest.mark.parametrize("how", [{"reason": "no memory"}, {"lost": True, "reason": "no memory"}, {}])
def test_how_a_job_ends(crew: Jobs, how: dict[str, Any]) -> None:
    """It has failed, or was lost, or was given back, as by a machine that cannot begin it."""
    ana = crew.joins("ana")
    crew.gives("0000-0", ana)
    ana.session.call(JobNews(job="0000-0", ended=True, **how))
    assert crew.ends() == Ended(job="0000-0", place="ana", **how)
    assert crew.executor.places == {"ana": ""}


def test_files_and_rows_of_a_job_come_from_the_machine_that_has_it(crew: Jobs, trained: RunDir) -> None:
    ana = crew.joins("ana")
    crew.gives("0000-0", ana)
    idle = crew.joins("luis")
    idle.send("0000-0", 4)
    ana.send("0001-0", 4)
    idle.session.call(JobNews(job="0000-0", rows='{"version": 1, "loss": 0.0}\n', ended=True, complete=True))
    ana.session.call(JobNews(job="0000-0", rows='{"version": 1, "loss": 1.0}\n'))
    crew.until(lambda: crew.run("0000-0").metrics.exists())
    assert [row["loss"] for row in read_jsonl(crew.run("0000-0").metrics)] == [1.0]
    assert (crew.versions("0000-0"), crew.executor.places) == ([], {"ana": "0000-0", "luis": ""})


def test_a_complete_run_that_goes_on_is_not_complete_until_its_new_end(crew: Jobs) -> None:
    """Its owner has asked for more steps. A coordinator that is killed now must not take it for complete."""
    run = crew.run("0000-0")
    write_run(run)
    write_json(run.status, {"state": "complete"})
    crew.gives("0000-0", crew.joins("ana"))
    assert read_object(run.status)["state"] == "running"
