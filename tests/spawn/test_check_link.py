"""`cuadrilla check link`: the whole way, each broken step by its name, and what the coordinator's half never does."""

import http.server
import json
import math
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from cuadrilla.errors import LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import grpc_check, wire
from cuadrilla.link.base import NodeReport, Progress, Refused
from cuadrilla.link.gate import bind
from cuadrilla.link.grpc_check import KNOWN_LAYOUT, known_tensors
from cuadrilla.link.grpc_client import SERVICE, Connection
from cuadrilla.link.grpc_server import CrewServer
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.offer import Offer
from cuadrilla.link.tls import Identity, key_hash, open_coordinator
from cuadrilla.link.wire import Layout
from cuadrilla.rundir import read_jsonl
from tests.commands import make_run, reached, wait_for
from tests.crews import NOW, join
from tests.ports import free_port
from tests.spawn.test_join import Machine, invite, up

STEPS = ["name", "route", "tcp", "tls", "credentials", "clock", "download", "upload", "average"]
QUICK = ("check", "link", "--seconds", "0.2")


class Crew:
    """A coordinator that waits for workers, and machines with and without a place in its crew."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.run = make_run(folder / "run", steps=100_000)
        self.coordinator, self.ana = Machine(folder / "coordinator"), Machine(folder / "ana")
        self.luis, self.stranger = Machine(folder / "luis"), Machine(folder / "stranger")
        self.machines = (self.coordinator, self.ana, self.luis, self.stranger)
        self.process = up(self.coordinator, self.run, self.port)
        done = self.ana.run("join", "--name", "ana", says=invite(self.coordinator))
        assert "has not been approved" in done.stderr, done.stderr  # it has joined all the same
        Home(self.ana.home).trust(done.stderr.split("cuadrilla trust ")[1].split()[0])

    def enrol(self, machine: Machine, name: str) -> None:
        """As `join` does, without an invite."""
        keys, home = open_coordinator(Home(self.coordinator.home).crew, now=NOW), Home(machine.home)
        folder = home.joined_folder(key_hash(keys.identity.certificate))
        identity = join(folder, name=name, crew=keys)
        AllowList(Home(self.coordinator.home).nodes).add(name, certificate=identity.certificate)
        home.remember(Joined(folder=folder, address=f"127.0.0.1:{self.port}", name=name))


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew(tmp_path_factory.mktemp("crew"))
    yield made
    made.process.terminate()  # a killed one would leave its temporary folder
    made.process.communicate(timeout=150)
    for machine in made.machines:
        machine.stop()


def broken(done: subprocess.CompletedProcess[str], step: str) -> str:
    """The error of a check that got as far as `step`."""
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert "hint: " in done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    *before, last = STEPS[: STEPS.index(step) + 1]
    assert lines == [*(["ok", name] for name in before), ["BROKEN", last]]
    return done.stderr.split("error: ")[1]


def test_the_whole_way_while_it_trains(crew: Crew) -> None:
    worker = crew.ana.start("join")
    wait_for(reached(crew.run, 1), worker)
    done = crew.ana.run("--json", *QUICK)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ok"], result["node"], result["address"]) == (True, "ana", f"127.0.0.1:{crew.port}")
    assert [step["step"] for step in result["steps"]] == STEPS
    assert all(step["ok"] and step["reason"] and step["seconds"] >= 0 for step in result["steps"])
    reasons = {step["step"]: step["reason"] for step in result["steps"]}
    assert reasons["route"].startswith("from 127.0.0.1")
    assert "round trip" in reasons["clock"]
    assert all(float(reasons[way].split()[0]) > 0 for way in ("download", "upload"))
    assert reasons["average"] == "33,768 numbers, all of them right"
    assert worker.poll() is None
    assert not [row for row in read_jsonl(crew.run.events) if row["event"] in ("left", "evicted")]
    worker.kill()
    worker.communicate()


def test_a_plain_web_server_at_the_port(crew: Crew) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        done = crew.ana.run(*QUICK, f"127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "does not speak TLS 1.3" in broken(done, "tls")


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_another_crews_coordinator(crew: Crew, dial: Callable[[str], Connection]) -> None:
    said = broken(crew.ana.run(*QUICK, dial("eva")._address), "tls")
    assert "is not the coordinator of the crew that this machine has joined" in said


def test_a_coordinator_that_is_down(crew: Crew) -> None:
    said = broken(crew.ana.run(*QUICK, f"127.0.0.1:{free_port()}"), "tcp")
    assert "nothing listens at 127.0.0.1" in said
    assert "cuadrilla up" in said


def test_a_name_that_nobody_knows(crew: Crew) -> None:
    assert "no machine named nadie.invalid is known" in broken(crew.ana.run(*QUICK, "nadie.invalid:47470"), "name")


def test_a_node_that_was_kicked(crew: Crew) -> None:
    crew.enrol(crew.luis, "luis")
    assert crew.coordinator.run("kick", "luis").returncode == 0
    said = broken(crew.luis.run(*QUICK), "credentials")
    assert "is not in the crew, or no longer" in said
    assert "cuadrilla join --new" in said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(QUICK, 5, "this machine has not joined a crew"), (("check", "link", "--seconds", "60"), 2, "--seconds")],
)
def test_nothing_to_check(crew: Crew, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = crew.stranger.run(*arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


# What the coordinator's half never does


class Nobody:
    """A run without workers."""

    def deliver(self, worker: str, message: object) -> None: ...

    def heard(self, worker: str, progress: Progress) -> None: ...

    def reported(self, worker: str, report: NodeReport) -> None: ...

    def left(self, worker: str, reason: str) -> None: ...


@pytest.fixture
def dial(tmp_path: Path) -> Iterator[Callable[[str], Connection]]:
    """A server of another crew in this process; nodes by name, of which only `ana` and `luis` are in its list."""
    keys, nodes = open_coordinator(tmp_path / "crew", now=NOW), AllowList(tmp_path / "nodes.json")
    layout, made = Layout.of({"weight": torch.zeros(3)}), []
    server = CrewServer(
        keys=keys, nodes=nodes, receiver=Nobody(), offer=Offer(config="{}", files={}), parameters=layout,
        contribution=layout,
    )  # fmt: skip
    port = server.serve(bind("127.0.0.1:0"))

    def connection(name: str) -> Connection:
        identity: Identity = join(tmp_path / name, name=name, crew=keys)
        if name in ("ana", "luis"):
            nodes.add(name, certificate=identity.certificate)
        made.append(Connection(f"127.0.0.1:{port}", identity=identity))
        return made[-1]

    yield connection
    for each in made:
        each.close()
    server.close()


def stalled(connection: Connection) -> Any:
    """A caller that asks for data and never reads it."""
    call = connection._channel.unary_stream(
        SERVICE + "Receive", request_serializer=pb.ReceiveRequest.SerializeToString
    )(pb.ReceiveRequest(seconds=1000))
    next(call)  # the measurement has begun
    return call


def measures(connection: Connection) -> bool:
    try:
        return connection.receive_for(0.01) > 0
    except LinkError as error:
        assert "another machine measures" in error.message
        return False


def test_strangers_get_nothing(dial: Callable[[str], Connection]) -> None:
    stranger = dial("eva")
    chunk = wire.chunk_of(b"hola")
    for call in (
        stranger.clock,
        lambda: stranger.receive_for(0.1),
        lambda: stranger.send_for(0.1, chunk),
        lambda: stranger.average(known_tensors(3), layout=KNOWN_LAYOUT),
    ):
        with pytest.raises(Refused):
            call()


def test_a_measurement_has_an_end(dial: Callable[[str], Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_check, "LIMIT_SECONDS", 0.1)
    ana = dial("ana")
    assert ana.receive_for(1e9) > 0
    assert ana.send_for(1e9, wire.chunk_of(bytes(1000))) > 0
    assert [ana.receive_for(seconds) for seconds in (math.nan, -1.0, 0.0)] == [0, 0, 0]


def test_one_measurement_at_a_time_and_a_stalled_one_is_cut(
    dial: Callable[[str], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    ana, luis = dial("ana"), dial("luis")
    call = stalled(ana)
    assert not measures(luis)
    call.cancel()
    wait_for(lambda: measures(luis))
    monkeypatch.setattr(grpc_check, "CUT_SECONDS", 0.1)
    call = stalled(ana)
    wait_for(lambda: measures(luis))
    call.cancel()


def test_a_sender_that_falls_silent_is_cut(
    dial: Callable[[str], Connection], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grpc_check, "CUT_SECONDS", 0.1)
    ana, luis, end = dial("ana"), dial("luis"), threading.Event()

    def silence() -> Iterator[pb.Chunk]:
        yield wire.chunk_of(b"hola")
        end.wait(timeout=150)

    call = ana._channel.stream_unary(SERVICE + "Send", request_serializer=pb.Chunk.SerializeToString)
    future = call.future(silence(), timeout=150)
    assert future.code() is grpc.StatusCode.CANCELLED
    end.set()
    wait_for(lambda: measures(luis))  # a hundredth of a second may bring nothing
    assert not caplog.records


def test_only_the_known_tensors_are_averaged(dial: Callable[[str], Connection]) -> None:
    ana = dial("ana")
    other = Layout.of({"matrix": torch.zeros(600, 600)})
    with pytest.raises(LinkError, match="tensors of another model"):
        ana.average({"matrix": torch.zeros(600, 600)}, layout=other)
    call = ana._channel.unary_unary(SERVICE + "Average", request_serializer=pb.Chunk.SerializeToString)
    whole = next(wire.chunks("mine", KNOWN_LAYOUT.pack(known_tensors(3)), layout=KNOWN_LAYOUT))
    cut, damaged = pb.Chunk(), pb.Chunk()
    for chunk, data in ((cut, whole.data[:-4]), (damaged, whole.data[:-1] + b"\x01")):
        chunk.CopyFrom(whole)
        chunk.data = data
    cut.crc = wire.chunk_of(cut.data).crc
    for chunk in (cut, damaged):
        with pytest.raises(grpc.RpcError) as caught:
            call(chunk, timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
