"""Whole runs over a real crew link, for machines that do as they should, and for others."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import safetensors.torch
import torch

from cuadrilla.engines.calls import MAX_TALK_BYTES, REQUEST
from cuadrilla.engines.children import Children
from cuadrilla.engines.run import train_run
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.jobs.crew import CrewPlaces, open_crew_places
from cuadrilla.jobs.origin import left_by
from cuadrilla.jobs.places import Left
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link.address import Address
from cuadrilla.link.base import PAUSED, Hello, Stop
from cuadrilla.link.grpc_client import SERVICE, Connection
from cuadrilla.link.jobs import COMPLETE, FAILED, GIVEN_BACK, MAX_ROWS, TALK_FILE, Assignment, JobNews, Recall
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.tls import Identity, enrol_identity, open_coordinator
from cuadrilla.link.wire import Layout
from cuadrilla.rundir import RunDir, read_jsonl, write_json
from cuadrilla.runfile import read_run_file
from cuadrilla.train.checkpoint import FILES, MANIFEST, find_newest, list_checkpoints, version_of
from tests.crews import NOW, join
from tests.hostile import CEILING_SECONDS, MIB, Held, chunk, wait_for
from tests.runs import RUN_FILE

STEPS = 8
NAMES = (*FILES, MANIFEST)


@dataclasses.dataclass(frozen=True)
class Named:
    """A job."""

    name: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run as a machine would train it. Read only."""
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
    """One that has joined: says what it likes of what `trained` has."""

    def __init__(self, crew: "Jobs", name: str, trained: RunDir) -> None:
        self.crew, self.name, self._trained = crew, name, trained
        self.connection = Connection(crew.address, identity=crew.identity(name))
        self.session = self.connection.session(parameters=Layout(()))
        self.session.call(Hello(speed_hint=1.0))
        crew.until(lambda: name in crew.places.places)

    def order(self) -> Assignment | Recall:
        order = self.session.next_order(timeout_seconds=CEILING_SECONDS)
        assert order is not None
        return order

    def send(self, job: str, version: int, *, change: Callable[[Path], None] | None = None) -> None:
        """A checkpoint, and that all of it has been sent."""
        folder = self.crew.folder / "sent" / self.name / f"v{version:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._trained.checkpoints / folder.name, folder)
        if change is not None:
            change(folder)
        for name in NAMES:
            self.session.keep(f"{job}/checkpoints/{folder.name}/{name}", folder / name)
        self.session.tell(JobNews(job=job, kept=version))

    def rows(self, *, to: int) -> tuple[dict[str, Any], ...]:
        rows = [row for row in read_jsonl(self._trained.metrics) if row["version"] <= to]
        return tuple({key: value for key, value in row.items() if isinstance(value, int | float)} for row in rows)

    def close(self) -> None:
        self.session.close()
        self.connection.close()


class Jobs:
    """A coordinator that gives jobs away, and the machines of a test."""

    def __init__(self, folder: Path, places: CrewPlaces[Named], *, address: str, home: Home, trained: RunDir) -> None:
        self.folder, self.places, self.address, self._home, self._trained = folder, places, address, home, trained
        self.left: list[Left[Named]] = []
        self.machines: list[Machine] = []

    def identity(self, name: str) -> Identity:
        keys = open_coordinator(self._home.crew, now=NOW)
        identity = join(self.folder / "nodes" / name, name=name, crew=keys)
        AllowList(self._home.nodes).add(name, certificate=identity.certificate)
        return identity

    def joins(self, name: str) -> Machine:
        self.machines.append(Machine(self, name, self._trained))
        return self.machines[-1]

    def until(self, condition: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.left += self.places.look()
            return condition()

        wait_for(looked)

    def gives(self, job: str, machine: Machine) -> Assignment:
        """Waits until it may have one."""
        self.until(lambda: machine.name in self.places.free)
        run = self.run(job)
        if not run.run_file.exists():
            write_run(run)
        self.places.start(Named(job), run, name=machine.name)
        order = machine.order()
        assert isinstance(order, Assignment)
        assert order.job == job
        return order

    def pause(self, name: str) -> None:
        self._home.pause(nodes=frozenset({name}), here=False)

    def run(self, job: str) -> RunDir:
        return RunDir(self.folder / "runs" / job)

    def ends(self) -> Left[Named]:
        self.until(lambda: bool(self.left))
        return self.left.pop(0)

    def versions(self, job: str) -> list[int]:
        return [version_of(path) for path in list_checkpoints(self.run(job).checkpoints)]


@pytest.fixture
def crew(tmp_path: Path, trained: RunDir) -> Iterator[Jobs]:
    home = Home(tmp_path / "home")
    with open_crew_places(home, listen=Address("127.0.0.1", 0), folder=tmp_path) as (places, opened):
        made = Jobs(tmp_path, places, address=opened.address, home=home, trained=trained)
        yield made
        for machine in made.machines:
            machine.close()


def test_a_job_to_its_end(crew: Jobs, trained: RunDir) -> None:
    ana = crew.joins("ana")
    order = crew.gives("0000-0", ana)
    assert [file.path for file in order.files] == ["task.py"]
    assert order.begun == ()
    ana.connection.fetch(order.files[0], to=crew.folder / "fetched.py")
    ana.session.tell(JobNews(job="0000-0", rows=ana.rows(to=STEPS)))
    for version in (2, 4, STEPS):
        ana.send("0000-0", version)
    ana.session.tell(JobNews(job="0000-0", ended=COMPLETE))
    left = crew.ends()
    assert (left.complete, left.reason, left.place) == (True, "", "ana")
    run = crew.run("0000-0")
    newest = find_newest(run.checkpoints)
    assert newest is not None
    weights = (newest / "model.safetensors").read_bytes()
    assert weights == (trained.checkpoints / "v00000008" / "model.safetensors").read_bytes()
    assert [row["version"] for row in read_jsonl(run.metrics)] == [row["version"] for row in ana.rows(to=STEPS)]
    assert not list(run.path.glob(".incoming*"))
    assert crew.places.free == ["ana"]


def test_another_machine_goes_on_from_what_the_first_has_sent(crew: Jobs) -> None:
    ana, luis = crew.joins("ana"), crew.joins("luis")
    crew.gives("0000-0", ana)
    ana.session.tell(JobNews(job="0000-0", rows=ana.rows(to=5)))
    ana.send("0000-0", 4)
    crew.until(lambda: crew.versions("0000-0") == [4])
    ana.close()
    left = crew.ends()
    assert (left.complete, left.reason) == (False, "")
    order = crew.gives("0000-0", luis)
    assert {file.path for file in order.begun} == {
        "metrics.jsonl",
        *(f"checkpoints/v00000004/{name}" for name in NAMES),
    }
    for file in order.begun:
        luis.connection.fetch(file, to=crew.folder / "fetched")
        assert hashlib.sha256((crew.folder / "fetched").read_bytes()).digest() == file.sha256


def test_a_job_is_recalled_and_given_back(crew: Jobs) -> None:
    ana = crew.joins("ana")
    crew.gives("0000-0", ana)
    crew.places.stop()
    assert ana.order() == Recall(job="0000-0")
    ana.send("0000-0", 4)
    ana.session.tell(JobNews(job="0000-0", ended=GIVEN_BACK))
    left = crew.ends()
    assert (left.complete, left.reason) == (False, "")
    assert crew.versions("0000-0") == [4]


@pytest.mark.parametrize("saves", [True, False])
def test_a_machine_that_is_paused_saves_first(crew: Jobs, monkeypatch: pytest.MonkeyPatch, saves: bool) -> None:
    """One that does not is held all the same, after a while. It gets nothing new meanwhile."""
    monkeypatch.setattr("cuadrilla.jobs.crew.SAVE_SECONDS", 60.0 if saves else 0.5)
    ana = crew.joins("ana")
    crew.gives("0000-0", ana)
    crew.pause("ana")
    crew.until(lambda: crew.places.free == [])
    assert ana.order() == Recall(job="0000-0")
    if saves:
        ana.send("0000-0", 4)
        ana.session.tell(JobNews(job="0000-0", ended=GIVEN_BACK))
    left = crew.ends()
    assert (left.complete, left.reason) == (False, "")
    crew.until(lambda: crew.places.places == [])
    stop = ana.session.next_event()
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.again) == (PAUSED, True)
    assert crew.versions("0000-0") == ([4] if saves else [])


# Calls of a function


CODE = "def score(x):\n    return x\n"


def gives_a_call(crew: Jobs, machine: Machine, *, job: str = "t0000-r0") -> Assignment:
    crew.until(lambda: machine.name in crew.places.free)
    (crew.folder / "f.py").write_text(CODE)
    run = crew.run(job)
    run.path.mkdir(parents=True, exist_ok=True)
    request = {"file": str(crew.folder / "f.py"), "files": ["f.py"], "imports": [], "function": "score"}
    write_json(run.path / REQUEST, request | {"sha256": "0" * 64, "arguments": {"x": 2.5}})
    crew.places.start(Named(job), run, name=machine.name)
    order = machine.order()
    assert isinstance(order, Assignment)
    return order


def keep_talk(machine: Machine, job: str, text: str, *, name: str = TALK_FILE) -> None:
    (machine.crew.folder / "talk.txt").write_text(text)
    machine.session.keep(f"{job}/{name}", machine.crew.folder / "talk.txt")


def test_a_call_to_its_end(crew: Jobs) -> None:
    ana = crew.joins("ana")
    order = gives_a_call(crew, ana)
    assert ([file.path for file in order.files], order.config, order.begun) == (["f.py"], "", ())
    assert json.loads(order.call)["arguments"] == {"x": 2.5}
    ana.connection.fetch(order.files[0], to=crew.folder / "fetched.py")
    assert (crew.folder / "fetched.py").read_text() == CODE
    keep_talk(ana, order.job, "looking\n")
    ana.session.tell(JobNews(job=order.job, ended=COMPLETE, figures={"score": 2.5, "seconds": 0.1}))
    left = crew.ends()
    assert (left.complete, left.reason, left.figures) == (True, "", {"score": 2.5, "seconds": 0.1})
    run = crew.run(order.job)
    assert (run.logs / "talk.txt").read_text() == "looking\n"
    assert not list(run.path.glob(".incoming*"))
    assert crew.places.free == ["ana"]


def test_a_call_that_two_machines_say_has_failed_has_failed(crew: Jobs) -> None:
    for name in ("ana", "luis"):
        machine = crew.joins(name)
        order = gives_a_call(crew, machine)
        keep_talk(machine, order.job, f"{name}: no\n")
        machine.session.tell(JobNews(job=order.job, ended=FAILED, reason="f.py:2: ValueError: no"))
        left = crew.ends()
    assert (left.complete, left.reason, left.figures) == (False, "f.py:2: ValueError: no", {})
    assert (crew.run(order.job).logs / "talk.txt").read_text() == "ana: no\nluis: no\n"


def test_what_a_call_does_not_bring(crew: Jobs) -> None:
    """Rows, checkpoints, other files, a flood of talk; nor is it complete without figures."""
    ana = crew.joins("ana")
    order = gives_a_call(crew, ana)
    for name in ("logs/other.txt", "run.toml", "checkpoints/v00000001/state.json", "../talk.txt"):
        with pytest.raises(LinkError, match="nobody wants that file"):
            keep_talk(ana, order.job, "x", name=name)
    with pytest.raises(LinkError, match="nobody wants that file"):
        keep_talk(ana, order.job, "x" * (MAX_TALK_BYTES + 1))
    ana.session.tell(JobNews(job=order.job, rows=ana.rows(to=STEPS), kept=4))
    ana.session.tell(JobNews(job=order.job, ended=COMPLETE))
    left = crew.ends()
    assert (left.complete, left.reason) == (False, ""), "another machine makes it"
    assert sorted(path.name for path in crew.run(order.job).path.iterdir()) == [REQUEST]


# Lies


def resealed(folder: Path) -> None:
    """The manifest says what is there now."""
    files = {
        name: {
            "num_bytes": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        }
        for name in FILES
    }
    (folder / MANIFEST).write_text(json.dumps({"schema": 1, "files": files}))


def other_model(folder: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    resealed(folder)


def other_version(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "version": 5}))
    resealed(folder)


def no_tensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    resealed(folder)


def deep_state(folder: Path) -> None:
    (folder / "state.json").write_text("[" * 100_000)
    resealed(folder)


def bit_flip(folder: Path) -> None:
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "model.safetensors").write_bytes(raw)


def manifest_of(value: object) -> Callable[[Path], None]:
    return lambda folder: write_manifest(folder, value)


def write_manifest(folder: Path, value: object) -> None:
    (folder / MANIFEST).write_text(json.dumps(value))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "another model": other_model,
    "another step": other_version,
    "no tensors": no_tensors,
    "a state without end": deep_state,
    "a flipped bit": bit_flip,
    "a manifest of numbers": manifest_of({"schema": 1, "files": dict.fromkeys(FILES, 5)}),
    "a manifest of another kind": manifest_of({"schema": "x", "files": []}),
    "a manifest of the future": manifest_of({"schema": 99}),
    "a list": manifest_of([]),
}


def test_checkpoints_that_are_none_count_as_nothing(crew: Jobs) -> None:
    """And whatever they hold, the coordinator goes on."""
    mala = crew.joins("mala")
    crew.gives("0000-0", mala)
    mala.send("0000-0", 2)
    crew.until(lambda: crew.versions("0000-0") == [2])
    for damage in DAMAGES.values():
        mala.send("0000-0", 4, change=damage)
    mala.send("0000-0", 8)
    crew.until(lambda: 8 in crew.versions("0000-0"))
    assert crew.versions("0000-0") == [2, 8]


@pytest.mark.parametrize(
    ("rows", "versions"),
    [(0, ()), (STEPS, ()), (STEPS, (4,)), (5, (STEPS,))],
    ids=["nothing", "rows", "half", "no end"],
)
def test_who_says_that_a_run_is_complete_must_have_sent_its_end(
    crew: Jobs, rows: int, versions: tuple[int, ...]
) -> None:
    """Its first lie has another machine try, and a second one is a failure of the job with its reason."""
    mala = crew.joins("mala")
    for tries in range(2):
        crew.gives("0000-0", mala)
        if tries == 0:
            mala.session.tell(JobNews(job="0000-0", rows=mala.rows(to=rows)))
        for version in versions:
            mala.send("0000-0", version)
        mala.session.tell(JobNews(job="0000-0", ended=COMPLETE))
        left = crew.ends()
        assert not left.complete
    assert "has not sent" in left.reason


def test_one_failure_is_the_machine_s_and_two_are_the_job_s(crew: Jobs) -> None:
    ana, luis = crew.joins("ana"), crew.joins("luis")
    crew.gives("0000-0", ana)
    ana.session.tell(JobNews(job="0000-0", ended=FAILED, reason="no memory"))
    assert crew.ends().reason == ""
    crew.gives("0000-0", luis)
    luis.session.tell(JobNews(job="0000-0", ended=FAILED, reason="no memory"))
    assert crew.ends().reason == "no memory"


def test_what_nobody_can_go_on_from_is_set_aside(crew: Jobs) -> None:
    """A liar leaves what looks like a checkpoint of the model; the one before is not pruned for it."""
    ana, luis, mala = crew.joins("ana"), crew.joins("luis"), crew.joins("mala")
    crew.gives("0000-0", ana)
    ana.send("0000-0", 2)
    crew.until(lambda: crew.versions("0000-0") == [2])
    ana.session.tell(JobNews(job="0000-0", ended=GIVEN_BACK))
    crew.ends()
    crew.gives("0000-0", mala)
    for version in (4, 6, 8):
        mala.send("0000-0", version)
    crew.until(lambda: 8 in crew.versions("0000-0"))
    mala.session.tell(JobNews(job="0000-0", ended=GIVEN_BACK))
    crew.ends()
    assert left_by(crew.run("0000-0")) == "mala"
    for honest in (ana, luis):
        crew.gives("0000-0", honest)
        honest.session.tell(JobNews(job="0000-0", ended=FAILED, reason="a state without a ledger"))
        assert crew.ends().reason == ""
    assert crew.versions("0000-0") == [2]
    assert left_by(crew.run("0000-0")) == "ana"
    order = crew.gives("0000-0", luis)
    assert f"checkpoints/v00000002/{MANIFEST}" in {file.path for file in order.begun}


REFUSED = [
    "0000-0/run.toml",
    "0000-0/checkpoints/v00000004/../../run.toml",
    "0000-0/../0001-0/checkpoints/v00000004/state.json",
    "0001-0/checkpoints/v00000004/state.json",
    "/checkpoints/v00000004/state.json",
    "0000-0/checkpoints/v00000009/state.json",
    "0000-0/checkpoints/v00000000/state.json",
    f"0000-0/checkpoints/v{'9' * 5000}/state.json",
    "0000-0/checkpoints/v٠٠٠٠٠٠٠٤/state.json",
    "0000-0/checkpoints/v00000004/more.bin",
    "",
]


def keeps(connection: Connection, *chunks: pb.Chunk | bytes) -> str:
    """How a call ends that sends these."""
    raw = [item if isinstance(item, bytes) else item.SerializeToString() for item in chunks]
    call = connection._channel.stream_unary(SERVICE + "Keep")
    try:
        call(iter(raw), timeout=CEILING_SECONDS)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return str(error.code().name)
    return "OK"


def test_files_that_nobody_wants_are_refused(crew: Jobs) -> None:
    mala, ana = crew.joins("mala"), crew.joins("ana")
    crew.gives("0000-0", mala)
    crew.gives("0001-0", ana)
    before = {path for path in crew.folder.rglob("*") if "nodes" not in path.parts}
    for name in REFUSED:
        assert keeps(mala.connection, chunk(b"x", name=name, num_bytes=1)) == "INVALID_ARGUMENT"
    state = "0000-0/checkpoints/v00000004/state.json"
    huge = [(state, 2**25), ("0000-0/checkpoints/v00000004/manifest.json", 2**17), (state, 2**64 - 1)]
    huge += [("0000-0/checkpoints/v00000004/model.safetensors", 65 * MIB + 2**20)]
    for name, size in huge:
        assert keeps(mala.connection, chunk(b"x", name=name, num_bytes=size)) == "INVALID_ARGUMENT"
    first = chunk(b"x", name=state, num_bytes=2)
    assert keeps(mala.connection, first) == "INVALID_ARGUMENT"  # less than announced
    assert keeps(mala.connection, first, chunk(b"yz")) == "INVALID_ARGUMENT"  # more
    assert keeps(mala.connection, first, chunk(b"y", crc=1)) == "INVALID_ARGUMENT"
    assert keeps(mala.connection) == "INVALID_ARGUMENT"
    assert keeps(mala.connection, b"\xff\xff") == "INVALID_ARGUMENT"
    made = {path for path in crew.folder.rglob("*") if "nodes" not in path.parts} - before
    assert [path for path in made if path.is_file()] == []
    assert keeps(mala.connection, first, chunk(b"y")) == "OK"


def test_who_has_no_job_sends_nothing(crew: Jobs, trained: RunDir) -> None:
    ana = crew.joins("ana")
    crew.gives("0000-0", ana)
    first = chunk(b"x", name="0000-0/checkpoints/v00000004/state.json", num_bytes=1)
    idle = crew.joins("luis")
    assert keeps(idle.connection, first) == "INVALID_ARGUMENT"
    server = open_coordinator(crew._home.crew, now=NOW).identity.certificate
    with contextlib.closing(Connection(crew.address, identity=enrol_identity(server))) as stranger:
        assert keeps(stranger, first) == "PERMISSION_DENIED"
    AllowList(crew._home.nodes).remove("luis")
    assert keeps(idle.connection, first) == "PERMISSION_DENIED"
    idle.session.tell(JobNews(job="0000-0", rows=({"version": 1, "loss": 0.0},), ended=COMPLETE))
    ana.session.tell(JobNews(job="0000-0", rows=({"version": 1, "loss": 1.0},)))
    crew.until(lambda: crew.run("0000-0").metrics.exists())
    assert [row["loss"] for row in read_jsonl(crew.run("0000-0").metrics)] == [1.0]
    assert list(crew.places.busy) == ["ana"]


def test_an_upload_ends_with_the_job(crew: Jobs) -> None:
    """Of a machine that is kicked meanwhile: what arrives later is no file of the next machine's."""
    mala, ana = crew.joins("mala"), crew.joins("ana")
    crew.gives("0000-0", mala)
    first = chunk(b"x", name="0000-0/checkpoints/v00000004/state.json", num_bytes=2)
    stream = Held([first.SerializeToString()])
    call = mala.connection._channel.stream_unary(SERVICE + "Keep").future(iter(stream), timeout=CEILING_SECONDS)
    assert stream.waits.wait(CEILING_SECONDS)
    run = crew.run("0000-0")
    crew.until(lambda: bool(list(run.path.glob(".incoming*/*/.*.part"))))
    AllowList(crew._home.nodes).remove("mala")
    assert not crew.ends().complete
    crew.gives("0000-0", ana)
    stream.more.put(chunk(b"y").SerializeToString())
    stream.more.put(None)
    assert call.code().name == "INVALID_ARGUMENT"
    assert [path for path in run.path.rglob("*") if path.is_file() and "incoming" in str(path)] == []


def test_an_upload_whose_connection_is_gone_is_in_nobody_s_way(crew: Jobs) -> None:
    ana = crew.joins("ana")
    crew.gives("0000-0", ana)
    first = chunk(b"x", name="0000-0/checkpoints/v00000004/state.json", num_bytes=2)
    stream = Held([first.SerializeToString()])
    call = ana.connection._channel.stream_unary(SERVICE + "Keep").future(iter(stream), timeout=CEILING_SECONDS)
    crew.until(lambda: bool(list(crew.run("0000-0").path.glob(".incoming*/*/.*.part"))))
    ana.send("0000-0", 4)
    crew.until(lambda: crew.versions("0000-0") == [4])
    stream.more.put(None)
    wait_for(call.done)
    assert call.code().name == "CANCELLED"


def test_a_flood_of_rows_ends_the_session_and_fills_no_disk(crew: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.jobs.given.MORE_ROW_BYTES", 2 * MIB)
    mala = crew.joins("mala")
    crew.gives("0000-0", mala)
    fat = {"version": 1, **{f"k{number}": 1 / 3 for number in range(98)}}
    news = JobNews(job="0000-0", rows=(fat,) * MAX_ROWS)

    def flood() -> bool:
        with contextlib.suppress(LinkError):
            mala.session.tell(news)
        return bool(crew.left)

    crew.until(flood)
    assert not crew.ends().complete
    assert crew.run("0000-0").metrics.stat().st_size < 4 * MIB
    stop = mala.session.next_event()
    assert isinstance(stop, Stop)
    assert stop.refused


def test_numbers_of_steps_that_the_job_does_not_have(crew: Jobs) -> None:
    mala = crew.joins("mala")
    crew.gives("0000-0", mala)
    rows = ({"version": STEPS + 1, "val_loss": 0.0}, {"version": 10**11, "val_loss": 0.0}, {"version": 1, "loss": 2.0})
    mala.session.tell(JobNews(job="0000-0", rows=rows, kept=10**11))
    crew.until(lambda: crew.run("0000-0").metrics.exists())
    assert list(read_jsonl(crew.run("0000-0").metrics)) == [{"version": 1, "loss": 2.0}]


def test_a_newer_session_of_a_machine_has_no_job(crew: Jobs) -> None:
    ana = crew.joins("ana")
    crew.gives("0000-0", ana)
    with contextlib.closing(ana.connection.session(parameters=Layout(()))) as newer:
        newer.call(Hello(speed_hint=1.0))
        assert not crew.ends().complete
        crew.until(lambda: crew.places.free == ["ana"])
        stop = ana.session.next_event()
        assert isinstance(stop, Stop)


def test_a_process_that_ends_when_it_is_told_of_a_job_is_only_another_lost_one() -> None:
    """What it was told lies in a pipe that nobody reads any more."""
    died: list[str] = []
    children = Children(died=lambda name, _reason: died.append(name))
    children.start("job", [sys.executable, "-c", "pass"], environment={})
    process = children.alive["job"]
    process.wait(CEILING_SECONDS)
    assert process.stdin is not None
    process.stdin.write("/a/folder\n")
    assert children.look() == {"job": 0}
    assert died == []


def test_leftovers_of_a_killed_coordinator_are_removed(crew: Jobs) -> None:
    run = crew.run("0000-0")
    write_run(run)
    (run.path / ".incoming-0123" / "v00000004").mkdir(parents=True)
    write_json(run.status, {"state": "running"})
    crew.gives("0000-0", crew.joins("ana"))
    assert not (run.path / ".incoming-0123").exists()
