"""Messages about whole runs from untrusted machines, and which settings a node takes over from a coordinator."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.jobs.node import settings_here
from cuadrilla.link import wire
from cuadrilla.link.base import Refused
from cuadrilla.link.jobs import COMPLETE, FAILED, JOB_NAME, Assignment, CheckpointFile, JobNews, Recall
from cuadrilla.printable import one_line
from cuadrilla.runfile import dump, load_dumped, resolve

NAMES = st.one_of(
    st.text(max_size=80),
    st.sampled_from(["0003-1", "a" * 65, "..", "../x", "a/b", "C:\\x", "con ", "a\n", "", "ｊob", "-x"]),
)


def arrived(kind: type, **fields: Any) -> Any:
    """Encode a message with any field values, and decode it. Raises LinkError if it is refused."""
    return wire.decode(f"{kind.__name__} {json.dumps(fields)}".encode(), kind)


@given(NAMES, st.text(), st.integers(-(2**64), 2**64), st.sampled_from(["", COMPLETE, FAILED, "gone"]), st.text())
def test_any_news_is_refused_or_harmless(job: str, rows: str, version: int, ended: str, reason: str) -> None:
    try:
        news = arrived(JobNews, job=job, rows=rows, version=version, ended=ended, reason=reason)
    except LinkError:
        return
    assert JOB_NAME.fullmatch(news.job)
    assert news.version >= 0
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


def test_a_coordinator_starts_no_program_on_a_node(tmp_path: Path) -> None:
    """Neither by an alarm, which is a program. It cannot fill the disk with checkpoints, either."""
    alarm = 'alarm.command=["touch", "/tmp/owned"]'
    hostile = load_dumped(theirs(alarm, 'engine.kind="crew"', 'engine.listen="192.168.1.9:1"'))
    assert hostile.alarm.command
    here = settings_here(hostile, tmp_path, goes_on=False)
    assert here.alarm.command == []
    assert here.engine.kind == "local"
    assert here.checkpoint.keep == 2
    assert here.data.folder == str(tmp_path / "data")
    assert here.train.steps == 8


@pytest.mark.parametrize("path", ["/home/ana/private-model", "../other"])
@pytest.mark.parametrize("setting", ["model.init", "train.teacher"])
def test_a_coordinator_reads_no_model_of_a_node(tmp_path: Path, setting: str, path: str) -> None:
    hostile = load_dumped(theirs(f'{setting}="{path}"'))
    with pytest.raises(Refused, match="does not send"):
        settings_here(hostile, tmp_path, goes_on=False)


def test_a_teacher_that_was_sent_is_used(tmp_path: Path) -> None:
    (tmp_path / "teachers" / "0").mkdir(parents=True)
    assert settings_here(load_dumped(theirs('train.teacher="t"')), tmp_path, goes_on=False).train.teacher == ["t"]


def test_a_run_that_begins_elsewhere_goes_on_here_without_the_weights_it_began_with(tmp_path: Path) -> None:
    settings = load_dumped(theirs('model.init="../mine"'))
    assert settings_here(settings, tmp_path, goes_on=True).model.init == "../mine", "as its checkpoints have it"
    (tmp_path / ".initial").mkdir()
    assert settings_here(settings, tmp_path, goes_on=False).model.init == "../mine"


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"train": {"steps": 1e999}}', '{"alarm": 5}', "9" * 5000])
def test_a_configuration_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_dumped(text)
