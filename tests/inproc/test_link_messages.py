"""Hostile messages, uploads and downloads of a node that is in the crew: an error of ours, or nothing."""

import contextlib
import gc
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from google.protobuf.message import DecodeError

from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import Contribution, Goodbye, Hello, Lease, NodeReport, SaidLine
from cuadrilla.link.grpc_client import Connection
from cuadrilla.link.reports import report_from_wire, report_to_wire
from tests.hostile import (
    BIG,
    CEILING_SECONDS,
    HUGE,
    LAYOUT,
    MIB,
    PARAMETERS,
    SEEDS,
    WHOLE,
    Crew,
    Held,
    abuser,
    chunk,
    first_chunk,
    hello_bytes,
    memory_stays,
    mutated,
    to,
    wait_for,
)

# Ten thousand frames for whoever reads them: an error of ours, or a message that means something

NUM_FRAMES = 10_000


def test_ten_thousand_frames_raise_nothing_but_our_errors() -> None:
    chance = random.Random(2026)
    parsed = unparsed = 0
    for _ in range(NUM_FRAMES):
        kind = chance.choice(list(SEEDS))
        raw = mutated(chance.choice(SEEDS[kind]).SerializeToString(), chance)
        try:
            message = kind.FromString(raw)
        except DecodeError:
            unparsed += 1
            continue
        parsed += 1
        with contextlib.suppress(LinkError):
            check_read(kind, message)
    assert min(parsed, unparsed) > NUM_FRAMES / 10


def check_read(kind: Any, message: Any) -> None:
    """What came through is what the rest of the program may rely on."""
    if kind is pb.ToCoordinator and message.WhichOneof("kind") == "report":
        report = report_from_wire(message.report)
        assert report_from_wire(report_to_wire(report)) == report
    elif kind is pb.ToCoordinator:
        uploads = wire.Uploads(wire.Layout.of(PARAMETERS))
        uploads.put("u", PARAMETERS)
        match wire.from_worker(message, uploads=uploads):
            case Hello(speed_hint=hint):
                assert 0 < hint < 1e12
            case Contribution() as answer:
                assert answer.transfer_seconds >= 0
                assert not answer.valid or answer.tensors is PARAMETERS
                assert not answer.valid or abs(answer.loss_sum) < float("inf")
    elif kind is pb.ToWorker:
        event = wire.from_coordinator(message)
        assert not isinstance(event, Lease) or (event.units and event.planned_tokens > 0)
    elif kind is pb.Chunk:
        assembly = wire.Assembly(LAYOUT.num_bytes, layout=LAYOUT)
        assembly.add(message)
        assembly.add(message)
        assert len(assembly.buffer) == LAYOUT.num_bytes


HELLO = to(hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=1.0))
ENDED_BY = {
    "nothing": pb.ToCoordinator(),
    "an unknown kind": b"\xfa\x7f\x02hi",
    "another protocol": to(hello=pb.Hello(protocol=wire.PROTOCOL + 1, speed_hint=1.0)),
    "no protocol": to(hello=pb.Hello(speed_hint=1.0)),
    "speed NaN": to(hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=float("nan"))),
    "speed infinite": to(hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=float("inf"))),
    "speed negative": to(hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=-1.0)),
    "speed zero": to(hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=0.0)),
    "speed 1e300": to(hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=1e300)),
    "transfer NaN": to(contribute=pb.Contribute(lease_id=1, transfer_seconds=float("nan"))),
    "transfer negative": to(contribute=pb.Contribute(lease_id=1, transfer_seconds=-3.0)),
    "transfer infinite": to(contribute=pb.Contribute(lease_id=1, transfer_seconds=float("inf"))),
}


def test_nonsense_ends_the_session(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client:
        for name, nonsense in ENDED_BY.items():
            answers = client.say(HELLO, nonsense, HELLO)
            assert [answer.stop.refused for answer in answers] == [True], name
            assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
            assert isinstance(crew.heard.next("mala"), Hello)
            assert crew.heard.messages["mala"].empty(), name
            assert crew.works()


BORNE = {
    "passes 2^64-1": to(progress=pb.Progress(micro_steps=HUGE)),
    "an answer without tensors": to(contribute=pb.Contribute(lease_id=1, valid=True)),
    "numbers of 2^64-1": to(contribute=pb.Contribute(lease_id=HUGE, tokens=HUGE, valid=True)),
    "loss NaN": to(contribute=pb.Contribute(lease_id=1, loss_sum=float("nan"), valid=True)),
    "tensors of nobody": to(contribute=pb.Contribute(lease_id=1, upload="x" * MIB, valid=True)),
    "an environment of 1 MB": to(
        hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=1.0, environment={"x" * MIB: "y" * MIB})
    ),
    "100,000 facts": to(
        hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=1.0, environment={str(i): "" for i in range(100_000)})
    ),
    "a goodbye of 1 MB": to(goodbye=pb.Goodbye(reason="x" * MIB)),
    "unknown fields": HELLO.SerializeToString() + b"\xfa\x7f\x02hi" * 1000,
    "two kinds at once": HELLO.SerializeToString() + to(progress=pb.Progress(micro_steps=1)).SerializeToString(),
}


def test_what_is_borne_is_bounded(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client, memory_stays(96 * MIB):
        for message in BORNE.values():
            client.say(message)
            wait_for(lambda: crew.server.workers() == ["ana"])
            assert crew.works()
    while not crew.heard.messages["mala"].empty():
        match crew.heard.next("mala"):
            case Contribution() as answer:
                assert not answer.valid
                assert answer.tensors == {}
            case Hello() as hello:
                assert len(hello.environment) <= 100
                assert all(len(key) + len(value) <= 2 * wire.MAX_TEXT for key, value in hello.environment.items())
            case Goodbye() as goodbye:
                assert len(goodbye.reason) <= wire.MAX_TEXT


def test_hundreds_of_damaged_messages_over_sessions(crew: Crew) -> None:
    chance = random.Random(11)
    seeds = [message.SerializeToString() for message in SEEDS[pb.ToCoordinator]]
    with abuser(crew, crew.node("mala")) as client, memory_stays(96 * MIB):
        for _ in range(300):
            crew.now += 60  # as slowly as nobody minds
            client.say(*(mutated(chance.choice(seeds), chance) for _ in range(3)))
    while not crew.heard.messages["mala"].empty():
        heard = crew.heard.next("mala")
        assert not isinstance(heard, Contribution) or not heard.valid
    wait_for(lambda: crew.server.workers() == ["ana"])
    assert crew.works()


# Uploads and downloads


OTHER_SHAPE = wire.Layout((("bias", torch.float32, (3,)), ("weight", torch.float32, (4, 2))))
OTHER_DTYPE = wire.Layout((("bias", torch.int32, (3,)), ("weight", torch.int32, (2, 4))))
HUGE_SHAPE = [pb.Tensor(name="bias", dtype="float32", shape=[HUGE] * 8)]
HOSTILE_UPLOADS: dict[str, list[pb.Chunk | bytes]] = {
    "nothing": [],
    "one chunk of nothing": [pb.Chunk()],
    "another size": [first_chunk(WHOLE, num_bytes=LAYOUT.num_bytes + 1)],
    "2^64-1 bytes": [first_chunk(WHOLE, num_bytes=HUGE)],
    "another shape": [first_chunk(WHOLE, layout=OTHER_SHAPE)],
    "another dtype": [first_chunk(WHOLE, layout=OTHER_DTYPE)],
    "an unknown dtype": [chunk(WHOLE, num_bytes=len(WHOLE), tensors=[pb.Tensor(name="bias", dtype="object")])],
    "shapes of 2^64-1": [chunk(WHOLE, num_bytes=len(WHOLE), tensors=HUGE_SHAPE)],
    "a wrong checksum": [chunk(WHOLE, crc=1, num_bytes=len(WHOLE), tensors=LAYOUT.describe())],
    "too much": [first_chunk(WHOLE), chunk(b"x")],
    "too much at once": [first_chunk(WHOLE + bytes(3 * MIB))],
    "too little": [first_chunk(WHOLE[:-1])],
    "a second beginning": [first_chunk(WHOLE[:20]), first_chunk(WHOLE)],
    "5 MiB in a chunk": [first_chunk(bytes(5 * MIB))],
    "noise": [b"\xff" * 1000],
}


def test_hostile_uploads_are_refused(crew: Crew) -> None:
    identity = crew.node("mala")
    connection = Connection(crew.address, identity=identity)
    session = connection.session(parameters=LAYOUT)
    session.call(Hello(speed_hint=1.0))
    assert isinstance(crew.heard.next("mala"), Hello)
    with abuser(crew, identity) as client, memory_stays(64 * MIB):
        for name, chunks in HOSTILE_UPLOADS.items():
            got = client.status("Upload", chunks)
            assert got in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL"), name
            session._outgoing.put(
                to(contribute=pb.Contribute(lease_id=1, tokens=1, loss_sum=1.0, upload="u", valid=True))
            )
            answer = crew.heard.next("mala")
            assert isinstance(answer, Contribution)
            assert not answer.valid, name
            assert crew.works()
    session.close()
    connection.close()


def test_a_million_tensors_in_one_chunk(crew: Crew) -> None:
    """4 MiB on the wire may not become hundreds of MiB here."""
    identity = crew.node("mala")
    raw = b"\x12\x00" * (2 * MIB - 1000)
    with abuser(crew, identity) as client:
        hello = Held([hello_bytes()])
        call = client.stream("Session", hello)
        assert isinstance(crew.heard.next("mala"), Hello)
        with peak_memory() as peak:
            assert client.status("Upload", [raw]) == "INVALID_ARGUMENT"
        hello.more.put(None)
        call.cancel()
    assert peak() < 192 * MIB
    assert crew.works()


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """The largest growth of this process's memory, looked at every few milliseconds."""
    process, stop, largest = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def look() -> None:
        while not stop.wait(0.005):
            largest[0] = max(largest[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=look, name="looks at the memory")
    watcher.start()
    try:
        yield lambda: largest[0]
    finally:
        stop.set()
        watcher.join()


def assemblies() -> list[wire.Assembly]:
    return [item for item in gc.get_objects() if type(item) is wire.Assembly and item.buffer]


def test_a_node_has_one_upload_at_a_time(big_crew: Crew) -> None:
    """Or a node that begins a thousand takes a thousand times the model's memory."""
    crew, identity, count = big_crew, big_crew.node("mala"), 12
    begun = [first_chunk(bytes(MIB), layout=BIG), *(chunk(bytes(MIB)) for _ in range(7))]
    session_held, held = Held([hello_bytes()]), []
    with abuser(crew, identity) as client:
        session = client.stream("Session", session_held)
        assert isinstance(crew.heard.next("mala"), Hello)
        calls = []
        for _ in range(count):
            held.append(Held([item.SerializeToString() for item in begun]))
            calls.append(client.stream("Upload", held[-1]))
        try:
            wait_for(
                lambda: sum(call.done() for call in calls) + sum(a.received == 8 * MIB for a in assemblies()) >= count
            )
            num_buffers = len(assemblies())
        finally:
            for each in (session_held, *held):
                each.more.put(None)
            for call in (*calls, session):
                call.cancel()
    assert num_buffers <= 1
    assert crew.works()


def test_uploads_without_an_end_are_harmless(crew: Crew) -> None:
    """Empty chunks for ever, a stream that stops in the middle; then the node's own next upload counts."""
    identity = crew.node("mala")
    stop = threading.Event()

    def endless() -> Iterator[bytes]:
        yield first_chunk(WHOLE[:20]).SerializeToString()
        while not stop.is_set():
            yield chunk(b"").SerializeToString()

    with abuser(crew, identity) as client:
        hello, stalled = Held([hello_bytes()]), Held([first_chunk(WHOLE[:20]).SerializeToString()])
        session = client.stream("Session", hello)
        assert isinstance(crew.heard.next("mala"), Hello)
        calls = [client.stream("Upload", stalled), client.stream("Upload", endless())]
        assert stalled.waits.wait(CEILING_SECONDS)
        with memory_stays(64 * MIB):
            assert all(crew.works() for _ in range(20))
        stop.set()
        for each in (hello, stalled):
            each.more.put(None)
        for call in (*calls, session):
            call.cancel()
    wait_for(lambda: crew.server.workers() == ["ana"])
    assert crew.works()


def test_downloads_from_beyond_the_end(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    assert crew.works()  # makes version 1
    with abuser(crew, crew.node("mala")) as client:
        for offset in (0, 1, 499, 500, 501, 2**31, 2**63 - 1, 2**63, HUGE):
            for name in ("version-1", (b"f" * 32).hex()):
                got = client.status("Download", [pb.DownloadRequest(name=name, offset=offset)])
                assert got in ("OK", "OUT_OF_RANGE", "INVALID_ARGUMENT"), (name, offset)
    assert "Traceback" not in caplog.text
    assert crew.works()


NOT_OFFERED = (
    "",
    "version-0",
    "version--1",
    "../crew/ca.key",
    "/etc/passwd",
    "crew/ca.key",
    "file.bin",
    "ñ",
    "x" * MIB,
)


def test_downloads_of_what_is_not_offered(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    with abuser(crew, crew.node("mala")) as client:
        for name in NOT_OFFERED:
            assert client.status("Download", [pb.DownloadRequest(name=name)]) == "NOT_FOUND", name[:80]
    assert "Traceback" not in caplog.text
    assert crew.works()


def test_every_declared_call_is_answered_and_no_other(crew: Crew) -> None:
    """`crew.proto` declares the service; gRPC says UNIMPLEMENTED where the server knows no such call."""
    declared = [method.name for method in pb.DESCRIPTOR.services_by_name["Crew"].methods]
    with abuser(crew, crew.node("mala")) as client:
        assert [name for name in declared if client.status(name, []) == "UNIMPLEMENTED"] == []
        assert client.status("Shutdown", []) == "UNIMPLEMENTED"
    assert len(declared) == 15


def test_each_chunk_of_an_upload_is_progress(big_crew: Crew) -> None:
    """On a slow line heartbeats wait behind an upload: what arrives of it must count, or the worker is lost."""
    assert big_crew.works()
    heard = big_crew.heard.progress["ana"]
    num_chunks = math.ceil(BIG.num_bytes / wire.CHUNK_BYTES)
    assert num_chunks > 2
    assert heard == sorted(heard)
    assert set(range(1, num_chunks + 1)) <= set(heard)


# Reports of how a machine is: nothing of the training depends on them


def test_a_report_is_heard_and_a_flood_of_them_is_cut_and_said(crew: Crew) -> None:
    def report(number: int) -> pb.ToCoordinator:
        return pb.ToCoordinator(report=pb.Report(phase="computing", lines=[pb.LogLine(text=f"line {number}")]))

    held = Held([hello_bytes()])
    with abuser(crew, crew.node("luis")) as luis:
        call = luis.stream("Session", held)
        wait_for(lambda: bool(crew.server.workers()) and "luis" in crew.server.workers())
        crew.heard.next("luis")
        for number in range(30):
            held.more.put(report(number).SerializeToString())
        held.more.put(hello_bytes())  # what comes after them has been read once this is heard
        crew.heard.next("luis")
        told = [line.text for heard in crew.heard.reports["luis"] for line in heard.lines]
        assert told == [f"line {number}" for number in range(5)]
        crew.now += 10
        held.more.put(report(30).SerializeToString())
        wait_for(lambda: len(crew.heard.reports["luis"]) == 6)
        assert crew.heard.reports["luis"][-1].dropped == 25
        for number in range(200):
            held.more.put(report(number).SerializeToString())
        answers = [pb.ToWorker.FromString(raw) for raw in call]
        assert "far more than its work needs" in answers[-1].stop.reason
    assert crew.works()


def test_a_worker_tells_how_its_machine_is(crew: Crew) -> None:
    crew.session.report(NodeReport(phase="sending", lines=(SaidLine(level="warning", text="hot"),)))
    wait_for(lambda: bool(crew.heard.reports["ana"]))
    assert crew.heard.reports["ana"][0].lines == (SaidLine(level="warning", text="hot"),)
    assert 0 < (crew.session.round_trip() or 0) < CEILING_SECONDS
