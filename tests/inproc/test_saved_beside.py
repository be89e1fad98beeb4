"""A checkpoint written beside the run: the crew goes on, and whatever ends it meanwhile, no step is lost."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.errors import ResourceError
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.train import checkpoint as files
from cuadrilla.train.checkpoint import list_checkpoints, version_of
from cuadrilla.train.sinks import JsonlSink, Scalars
from tests.runs import final_sha256, metrics, prepare, workers
from tests.tasks import RaggedRegression
from tests.transports import run_through

SAVED, GOES_ON, STEPS = 4, 8, 12
CREW = (
    workers([1.0, 1.0]),
    f"train.steps={STEPS}",
    "sync.strict=true",
    "evaluate.every_tokens=999999",
)
SAVES = (*CREW, f"checkpoint.every_steps={SAVED}")

Write = Callable[..., Path]


class Disk:
    """Writes the checkpoint of step `SAVED` only when the run has gone on, or not at all."""

    def __init__(self, write: Write, *, fails: bool = False) -> None:
        self.write, self.fails = write, fails
        self.gone_on = threading.Event()
        self.tries: list[int] = []

    def save(self, folder: Path, **parts: Any) -> Path:
        version = parts["state"]["version"]
        self.tries.append(version)
        if version == SAVED:
            assert self.gone_on.wait(60), "the run waits for its checkpoint"
            if self.fails:
                raise ResourceError("no space left")
        return self.write(folder, **parts)


class Watch:
    """A sink: when the run has gone on its folder is copied, as a killed coordinator leaves it, and the disk writes."""

    def __init__(self, disk: Disk, run: RunDir) -> None:
        self.disk, self.run = disk, run
        self.copy = run.path.with_name("killed")

    def log(self, step: int, _scalars: Scalars) -> None:
        if step == GOES_ON:
            shutil.copytree(self.run.path, self.copy)
            self.disk.gone_on.set()

    def close(self) -> None:
        """Nothing is open."""


def train(folder: Path, *sets: str, disk: Disk | None = None) -> RunDir:
    folder.mkdir(exist_ok=True)
    run = RunDir(folder)
    sink = JsonlSink(run.metrics)
    try:
        more = [Watch(disk, run)] if disk else []
        run_through("grpc", prepare(folder, RaggedRegression(), *sets, sinks=[sink, *more]))
    finally:
        sink.close()
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, *CREW)
    return final_sha256(folder)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    slow = Disk(files.save_checkpoint)
    monkeypatch.setattr(files, "save_checkpoint", slow.save)
    return slow


def test_the_crew_goes_on_and_the_checkpoint_is_of_its_step(tmp_path: Path, disk: Disk, undisturbed: str) -> None:
    run = train(tmp_path / "run", *SAVES, "checkpoint.keep=99", disk=disk)
    assert final_sha256(run.path) == undisturbed
    assert [version_of(path) for path in list_checkpoints(run.checkpoints)] == [0, SAVED, GOES_ON, STEPS]
    for newer in list_checkpoints(run.checkpoints)[2:]:
        shutil.rmtree(newer)
    shutil.rmtree(run.journal)
    run.metrics.unlink()
    train(run.path, *CREW)  # from the checkpoint alone
    assert final_sha256(run.path) == undisturbed


def test_a_coordinator_killed_meanwhile_loses_nothing(tmp_path: Path, disk: Disk, undisturbed: str) -> None:
    run = train(tmp_path / "run", *SAVES, disk=disk)
    killed = RunDir(run.path.with_name("killed"))
    assert [version_of(path) for path in list_checkpoints(killed.checkpoints)] == [0]
    train(killed.path, *CREW)
    assert final_sha256(killed.path) == undisturbed
    assert [row["version"] for row in metrics(killed.path)] == list(range(1, STEPS + 1))
    redone = [(row["version"], row["steps"]) for row in read_jsonl(killed.events) if row["event"] == "redone"]
    assert redone == [(GOES_ON, GOES_ON)]  # through two segments


def test_one_that_cannot_be_written_is_an_alarm_and_no_more(tmp_path: Path, disk: Disk, undisturbed: str) -> None:
    disk.fails = True
    run = train(tmp_path / "run", *SAVES, disk=disk)
    assert disk.tries == [0, SAVED, GOES_ON, STEPS]
    assert final_sha256(run.path) == undisturbed
    assert [row["message"] for row in read_jsonl(run.events) if row["event"] == "alarm"] == ["no space left"]
    killed = RunDir(run.path.with_name("killed"))
    train(killed.path, *CREW)  # the segment behind the lost checkpoint counts all the same
    assert final_sha256(killed.path) == undisturbed
