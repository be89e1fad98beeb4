"""Messages about whole runs from untrusted machines, and which settings a node takes over from a coordinator."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.config import Config
from cuadrilla.crew import bundle
from cuadrilla.crew.bundle import fetch_run
from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.home import Home
from cuadrilla.jobs.node import settings_here
from cuadrilla.link import wire
from cuadrilla.link.base import RunDescription
from cuadrilla.link.jobs import JOB_NAME, Assignment, CheckpointFile, JobNews, Recall
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import dump, load_dumped, resolve

NAMES = st.one_of(
    st.text(max_size=80),
    st.sampled_from(["0003-1", "a" * 65, "..", "../x", "a/b", "C:\\x", "con ", "a\n", "", "ｊob", "-x"]),
)


def arrived(kind: type, **fields: Any) -> Any:
    """Encode a message with any field values, and decode it. Raises LinkError if it is refused."""
    return wire.decode(f"{kind.__name__} {json.dumps(fields)}".encode(), kind)


@given(NAMES, st.text(), st.sampled_from([True, False, "gone"]), st.text())
def test_any_news_is_refused_or_harmless(job: str, rows: str, ended: bool | str, reason: str) -> None:
    try:
        news = arrived(JobNews, job=job, rows=rows, ended=ended, reason=reason)
    except LinkError:
        return
    assert JOB_NAME.fullmatch(news.job)
    assert news.reason == one_line(news.reason)


STATE = "checkpoints/v00000010/state.json"


@pytest.mark.parametrize(
    ("job", "begun"),
    [
        ("logs/x", []),
        ("a", ["../../.bashrc"]),
        ("a", ["run.toml"]),
        ("a", ["checkpoints/v00000010/more.bin"]),
        ("a", ["checkpoints/v٠٠٠٠٠٠١٠/state.json"]),
        ("a", [f"{STATE}\n"]),
        ("a", ["checkpoints/v0000000010/state.json"]),
        ("a", [""]),
    ],
)
def test_what_reaches_beyond_a_job_is_refused(job: str, begun: list[str]) -> None:
    files = [{"path": path, "sha256": "00" * 32, "num_bytes": 1} for path in begun]
    with pytest.raises(LinkError, match="with invalid values"):
        arrived(Assignment, job=job, run={"config": "{}", "files": []}, begun=files)
    with pytest.raises(LinkError):
        arrived(Recall, job="../x")
    for path in begun or [STATE]:
        with pytest.raises(LinkError, match="with invalid values"):
            arrived(CheckpointFile, job=job, path=path)


# How a node uses a run file of another machine

RUN_FILE = """
[data]
folder = "data"
[train]
steps = 8
[checkpoint]
keep = 10_000
"""


def theirs(*sets: str) -> str:
    return json.dumps(dump(resolve(RUN_FILE, sets=sets).config))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """The run of a job. Its files are fetched into the folder `fetched` beside it."""
    monkeypatch.setattr(bundle, "fetch", lambda _, told, **_more: (load_dumped(told.config), tmp_path / "fetched"))
    return RunDir(tmp_path / "run")


def fetch_settings(run: RunDir, *sets: str) -> Config:
    told = RunDescription(config=theirs(*sets), files=())
    return settings_here(fetch_run(None, told, run, home=Home(run.path), report=print))  # type: ignore[arg-type]


def test_a_coordinator_starts_no_program_on_a_node(run: RunDir) -> None:
    """Neither by an alarm, which is a program. It cannot fill the disk with checkpoints, either."""
    alarm = 'alarm.command=["touch", "/tmp/owned"]'
    here = fetch_settings(run, alarm, 'engine.kind="crew"', 'engine.listen="192.168.1.9:1"')
    assert here.alarm.command == []
    assert here.engine.kind == "local"
    assert here.checkpoint.keep == 2
    assert here.data.folder == str(run.path.parent / "fetched" / "data")
    assert here.train.steps == 8


def test_a_coordinator_reads_no_model_of_a_node(run: RunDir) -> None:
    """Folders in the run come before the paths in the settings."""
    fetch_settings(run, 'model.init="/home/ana/private-model"', 'train.teacher="../other"')
    assert list(run.initial.iterdir()) == list(run.teachers.iterdir()) == []


def test_models_that_were_sent_are_used(run: RunDir) -> None:
    sent = RunDir(run.path.parent / "fetched")
    for folder in (sent.teachers / "0", sent.initial):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    fetch_settings(run)
    assert (run.teachers / "0" / "config.json").exists()
    assert (run.initial / "config.json").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"train": {"steps": 1e999}}', '{"alarm": 5}', "9" * 5000])
def test_a_configuration_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_dumped(text)
