"""The runs of a queue and the trials of a search, as their files tell of them: who has what, and what a look costs."""

import json
import os
from pathlib import Path

import pytest

from cuadrilla.host.usage import Usage
from cuadrilla.jobs.deal import Wants
from cuadrilla.jobs.queue import RunQueue
from cuadrilla.link.base import NodeReport
from cuadrilla.monitor.jobs import JobNow, QueueReader, SearchReader, WorkReader, open_jobs, work_data
from cuadrilla.monitor.run import REFRESH_SECONDS
from cuadrilla.monitor.watch_jobs import MAX_JOBS, JobsPlace, WatchedJobs, shown_jobs
from cuadrilla.rundir import FolderLock, RunDir, append_event, write_json
from cuadrilla.train.nodelog import NodeLogs
from cuadrilla.tune.folder import STARTED
from cuadrilla.tune.search import Job, JobPart
from tests.searches import FAILS, STEPS, WrittenSearch
from tests.watched import add_rows

pytestmark = pytest.mark.unit

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J"


def make(folder: Path, train: str = "steps = 400") -> RunDir:
    folder.mkdir()
    (folder / "run.toml").write_text(f"[train]\n{train}\n")
    return RunDir(folder)


def step(version: int, **more: object) -> dict[str, object]:
    return {"version": version, "tokens": 100 * version, "loss": 3.0 - version / 1000, **more}


@pytest.fixture
def queue(tmp_path: Path) -> RunQueue:
    queue = RunQueue(tmp_path / "queue")
    for name in ("uno", "dos", "tres"):
        queue.add(make(tmp_path / name))
    return queue


@pytest.fixture
def reader(tmp_path: Path, queue: RunQueue) -> QueueReader:
    return QueueReader(tmp_path / "queue")


def lock(folder: Path) -> FolderLock:
    """As the process that hands out has it."""
    return FolderLock(folder / "lock", purpose="a test")


def by_title(jobs: list[JobNow]) -> dict[str, JobNow]:
    return {job.title: job for job in jobs}


def test_a_queue(tmp_path: Path, queue: RunQueue, reader: QueueReader) -> None:
    uno, dos = queue.find("uno"), queue.find("dos")
    add_rows(uno.run.metrics, [step(1), step(2, val_bits_per_byte=1.5), step(3)])
    write_json(uno.run.config, {"values": {"train": {"steps": 10}}})
    os.utime(uno.run.config, (1000, 1000))
    queue.note(uno, "running", place="luis/cuda:0")
    queue.note(dos, "failed", place="ana", reason="the disk is full")
    queue.put_first(queue.find("tres"))
    with lock(tmp_path / "queue"):
        jobs = reader.read()
    assert [job.title for job in jobs] == ["tres", "uno", "dos"]
    tres, uno_now, dos_now = jobs
    assert (tres.state, tres.place, tres.step, tres.steps, tres.began) == ("waiting", "", None, 400, None)
    assert (uno_now.state, uno_now.place) == ("running", "luis/cuda:0")
    assert (uno_now.step, uno_now.steps, uno_now.loss, uno_now.bits_per_byte) == (3, 10, 2.997, 1.5)
    assert uno_now.began == 1000
    assert (dos_now.state, dos_now.place, dos_now.reason) == ("failed", "ana", "the disk is full")
    assert dos_now.began is not None, "its run has written nothing: when it was noted"


def test_nobody_has_a_run_when_nobody_hands_out(queue: RunQueue, reader: QueueReader) -> None:
    queue.note(queue.find("uno"), "running", place="ana")
    assert (by_title(reader.read())["uno"].state, by_title(reader.read())["uno"].place) == ("waiting", "ana")


def test_how_long_a_run_is(tmp_path: Path) -> None:
    """By its settings: as they were when it began, else as its run file has them; from tokens, by those of a step."""
    queue = RunQueue(tmp_path / "queue")
    for name, train in {"tokens": "tokens = 950", "epochs": "epochs = 2", "broken": "[["}.items():
        queue.add(make(tmp_path / name, train))
    queue.add(RunDir(tmp_path / "gone"))
    reader = QueueReader(tmp_path / "queue")
    assert [job.steps for job in reader.read()] == [None] * 4
    for name in ("tokens", "epochs"):
        add_rows(tmp_path / name / "metrics.jsonl", [step(2)])
    now = by_title(reader.read())
    assert (now["tokens"].steps, now["epochs"].steps, now["epochs"].step) == (10, None, 2)
    (tmp_path / "broken" / "run.toml").write_text("[train]\nsteps = 7\n")
    assert by_title(reader.read())["broken"].steps == 7


def test_a_look_reads_what_is_new(tmp_path: Path, queue: RunQueue) -> None:
    uno = queue.find("uno").run
    add_rows(uno.metrics, [step(version) for version in range(1, 5000)])
    reader = QueueReader(tmp_path / "queue")
    reader.read()
    follower = reader._progress[queue.find("uno").name]._rows._metrics
    first = follower.bytes_read
    assert first <= 2**16, "of a long run only the end"
    add_rows(uno.metrics, [step(5000)])
    assert by_title(reader.read())["uno"].step == 5000
    assert 0 < follower.bytes_read - first < 200


def test_a_list_that_changes_is_read_again(tmp_path: Path, queue: RunQueue, reader: QueueReader) -> None:
    assert len(reader.read()) == 3
    queue.remove(queue.find("dos"))
    queue.add(make(tmp_path / "cuatro"), wants=Wants(device="cpu", on=("ana", "luis")))
    jobs = reader.read()
    assert [job.title for job in jobs] == ["uno", "tres", "cuatro"]
    assert jobs[-1].wants.on == ("ana", "luis")
    assert QueueReader(tmp_path / "nothing").read() == []


def test_rows_of_long_ago_and_rows_that_begin_anew(queue: RunQueue, reader: QueueReader) -> None:
    """What an evaluation finds later does not turn a run back; a file that was written anew does."""
    metrics = queue.find("uno").run.metrics
    add_rows(metrics, [step(40), {"version": 20, "val_loss": 2.0, "val_bits_per_byte": 1.25}])
    now = by_title(reader.read())["uno"]
    assert (now.step, now.bits_per_byte) == (40, 1.25)
    metrics.write_text(json.dumps(step(3)) + "\n")
    now = by_title(reader.read())["uno"]
    assert (now.step, now.bits_per_byte) == (3, None)


def test_hostile_files(tmp_path: Path) -> None:
    queue = RunQueue(tmp_path / "queue")
    run = make(tmp_path / HOSTILE)
    queue.add(run)
    queue.note(queue.runs()[0], "failed", place=HOSTILE, reason=HOSTILE * 999)
    add_rows(run.metrics, [{"version": 1e400, "loss": "x"}, {"version": True}, step(2, loss=[1])])
    with run.metrics.open("ab") as file:
        file.write(b'{"version": 3, "loss": NaN}\n\xff\n[]\n' + b"[" * 50_000 + b"\n")
    run.config.write_text('{"values": {"train": [1]}}')
    (tmp_path / "queue" / "x.json").write_text("[]")
    (job,) = QueueReader(tmp_path / "queue").read()
    assert (job.step, job.loss, job.steps) == (3, None, None)
    assert "\u202e" not in job.title + job.place + job.reason
    assert len(job.reason) < 1000


def test_a_search(tmp_path: Path) -> None:
    written = WrittenSearch(run=tmp_path / "casa", num_trials=8, rungs=1)
    folder = written.write(until=6)
    reader = SearchReader(folder.path)
    with lock(folder.path):
        jobs = reader.read()
        assert (reader.title, len(jobs)) == ("casa", 7)
        assert [job.title for job in jobs] == [f"t{number:04d}-r0" for number in range(7)]
        first, failed, last = jobs[0], jobs[FAILS], jobs[-1]
        assert (first.state, first.place, first.step, first.steps) == ("complete", "place-1", STEPS, STEPS)
        assert first.score is not None
        assert first.score > 4
        assert "optim.lr=0.0" in first.values
        assert (failed.state, failed.score, failed.reason) == ("failed", None, "the loss is not finite")
        assert (last.state, last.place, last.score) == ("running", "place-1", None)
        assert last.began is not None
        last_run = RunDir(folder.path / last.name)
        last_run.path.mkdir()
        add_rows(last_run.metrics, [step(30, val_bits_per_byte=2.0)])
        assert (reader.read()[-1].step, reader.read()[-1].bits_per_byte) == (30, 2.0)
        job = Job(trial=6, rung=0, values={})
        folder.left(job, JobPart(place="place-1", seconds=2.0))
        assert reader.read()[-1].state == "waiting", "its machine has given it back"
        folder.began(job, place="place-2")
        assert (reader.read()[-1].state, reader.read()[-1].place) == ("running", "place-2")
        append_event(folder.trials, STARTED)
        assert reader.read()[-1].state == "waiting", "the search was begun again"
    assert reader.read()[-1].state == "waiting", "nobody searches"


def test_a_search_of_somebody_else(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE / "tune"
    folder.mkdir(parents=True)
    rows = [
        {
            "event": "begun",
            "trial": 0,
            "rung": 0,
            "values": {HOSTILE: HOSTILE, "a": [1]},
            "place": HOSTILE,
            "time": "x",
        },
        {"event": "ended", "trial": 0, "rung": 0, "score": 1e999, "reason": [1], "figures": 5},
        {"event": "begun", "trial": "../..", "rung": 0},
        {"event": "begun", "trial": 1, "rung": 99},
    ]
    add_rows(folder / "trials.jsonl", rows)
    (folder / "search.json").write_text('{"identity": [], "rung_steps": {"0": 1}}')
    (job,) = SearchReader(folder).read()
    assert (job.title, job.state, job.score, job.steps, job.reason) == ("t0000-r0", "failed", None, None, "")
    assert "\u202e" not in job.values + job.place


def test_what_this_machine_hands_out(tmp_path: Path) -> None:
    """Its queue, or a search; a crew's one run is neither."""
    folder = WrittenSearch(run=tmp_path / "casa", num_trials=2).write()
    (tmp_path / "queue").mkdir()
    assert isinstance(open_jobs(tmp_path / "queue", queue=tmp_path / "queue"), QueueReader)
    assert isinstance(open_jobs(folder.path, queue=tmp_path / "queue"), SearchReader)
    assert open_jobs(tmp_path / "casa", queue=tmp_path / "queue") is None


@pytest.fixture
def at_work(tmp_path: Path, queue: RunQueue) -> RunDir:
    """Ana has joined and has a run, Luis has gone, and this machine has one itself."""
    folder = RunDir(tmp_path / "queue")
    for name in ("ana", "luis"):
        append_event(folder.events, "joined", worker=name)
        NodeLogs(folder.nodes).report(name, NodeReport(usage=Usage(cpu_percent=50.0), phase="computing"))
    append_event(folder.events, "left", worker="luis", reason="this machine leaves")
    queue.note(queue.find("uno"), "running", place="ana")
    queue.note(queue.find("dos"), "running", place="place-1")
    add_rows(queue.find("uno").run.metrics, [step(40)])
    return folder


def test_the_machines_of_a_queue(at_work: RunDir, reader: QueueReader) -> None:
    with lock(at_work.path):
        now = WorkReader(reader).read(now=0.0)
    assert (now.is_handed_out, now.num_ended) == (True, 0)
    ana, here, luis = now.machines.machines
    assert (ana.name, ana.here, ana.job, ana.share, ana.node.usage.cpu_percent) == ("ana", True, "uno 40/400", None, 50)
    assert (here.name, here.job) == ("place-1", "dos")
    assert (luis.name, luis.here, luis.job) == ("luis", False, "")
    told = work_data(now)
    json.dumps(told, allow_nan=False)
    assert [(job["name"], job["state"], job["machine"]) for job in told["jobs"]][:2] == [
        ("uno", "running", "ana"),
        ("dos", "running", "place-1"),
    ]
    assert [machine["jobs"] for machine in told["machines"]] == [["uno"], ["dos"], []]


def test_a_page_is_told_what_has_changed(at_work: RunDir, reader: QueueReader, queue: RunQueue) -> None:
    watched = WatchedJobs(reader, key_of=lambda job: f"key of {job.title}")

    def refreshed() -> None:
        watched._refreshed -= REFRESH_SECONDS
        watched.refresh()

    with lock(at_work.path):
        refreshed()
        news, place = watched.news(JobsPlace())
        assert (news["anew"], news["head"]["running"], len(news["jobs"])) == (True, True, 3)
        assert [job["key"] for job in news["jobs"]] == ["key of uno", "key of dos", "key of tres"]
        assert [job["state"] for job in news["jobs"]] == ["running", "running", "waiting"]
        assert [(row["name"], row["here"], len(row["jobs"])) for row in news["crew"]] == [
            ("ana", True, 1),
            ("place-1", True, 1),
            ("luis", False, 0),
        ]
        assert set(news["points"]) == {"ana", "luis"}
        refreshed()
        assert watched.news(place) == ({}, place)
        add_rows(queue.find("uno").run.metrics, [step(41)])
        refreshed()
        news, place = watched.news(place)
        assert (set(news), [job["step"] for job in news["jobs"]]) == ({"jobs"}, [41, None, None])
        queue.remove(queue.find("tres"))
        refreshed()
        news, place = watched.news(place)
        assert (set(news), len(news["jobs"]), news["head"]["number"]) == ({"jobs", "head"}, 2, 2)
        at_work.events.write_text("")
        refreshed()
        news, place = watched.news(place)
        assert (news["anew"], len(news["jobs"])) == (True, 2), "who reads it forgets all, and is told all"


def test_of_too_many_runs_those_that_ended_first_are_left_out() -> None:
    states = ["complete"] * 200 + ["running"] + ["complete"] * 100 + ["waiting"] * 50
    jobs = [JobNow(name=str(number), title="", run=None, state=state) for number, state in enumerate(states)]
    shown = shown_jobs(jobs)
    assert [int(job.name) for job in shown] == list(range(51, 351))
    assert len(shown_jobs(jobs + [jobs[200]] * MAX_JOBS)) == MAX_JOBS
