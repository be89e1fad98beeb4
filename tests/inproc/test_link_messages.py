"""Hostile messages, uploads and downloads of a node that is in the crew: an error of ours, or nothing."""

import gc
import json
import math
import random

import pytest
import torch

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import Download, Enroll, Hello, Lease, NodeReport, SaidLine, Stop
from cuadrilla.link.client import FROM_COORDINATOR
from cuadrilla.link.server import FROM_WORKER
from tests.commands import wait_for
from tests.hostile import (
    BIG,
    CEILING_SECONDS,
    HUGE,
    MIB,
    SEEDS,
    WHOLE,
    Crew,
    Held,
    abuser,
    memory_stays,
    mutated,
    raw,
    upload,
    uploaded,
)

# Ten thousand frames for whoever reads them: an error of ours, or a message that means something

NUM_FRAMES = 10_000


def test_ten_thousand_frames_raise_nothing_but_our_errors() -> None:
    """Whatever is read has values that the rest of the program may rely on: another machine would read the same."""
    chance = random.Random(2026)
    kinds = (*FROM_WORKER, *FROM_COORDINATOR, Enroll, Download)
    read = refused = 0
    for _ in range(NUM_FRAMES):
        try:
            message = wire.decode(mutated(chance.choice(SEEDS), chance), *kinds)
        except LinkError:
            refused += 1
            continue
        read += 1
        assert wire.decode(wire.encode(message), *kinds) == message
    assert min(read, refused) > NUM_FRAMES / 20


def said(kind: str, **fields: object) -> bytes:
    """A message whatever its values are."""
    return f"{kind} {json.dumps(fields)}".encode()


HELLO = Hello(speed_hint=1.0)
ENDED_BY: dict[str, object] = {
    "nothing": b"",
    "noise": b"\xfa\x7f\x02hi",
    "an unknown kind": said("Shutdown", reason="x"),
    "what only coordinators say": Lease(lease_id=1, version=1, units=(1,), planned_tokens=1),
    "bytes that belong to nothing": wire.DATA + b"x",
    "no JSON": b"Progress {",
    "a list": b"Progress [1]",
    "no values": said("Hello"),
    "another type": said("Progress", micro_steps="7"),
    "passes -1": said("Progress", micro_steps=-1),
    "passes 2^64-1": said("Progress", micro_steps=HUGE),
    "passes of 5,000 digits": b'Progress {"micro_steps": ' + b"9" * 5000 + b"}",
    "a part beyond the whole": said("Progress", micro_steps=1, part=7.0),
    "100,000 brackets": b"Hello " + b"[" * 100_000,
    **{f"speed {hint}": said("Hello", speed_hint=hint) for hint in (math.nan, math.inf, -1.0, 0.0, 1e300)},
    "an environment of 100,000 facts": said("Hello", speed_hint=1.0, environment={str(i): "" for i in range(100_000)}),
    "a sample of nobody": said("NodeReport", phase="\x1b[2J"),
    "a thousand lines": said("NodeReport", lines=[{"level": "info", "text": "x"}] * 1000),
}


def test_nonsense_ends_the_session(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client:
        for name, nonsense in ENDED_BY.items():
            answers = client.say(HELLO, nonsense, HELLO)
            assert [isinstance(answer, Stop) and answer.refused for answer in answers] == [True], name
            assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
            assert isinstance(crew.heard.next("mala"), Hello)
            assert crew.heard.messages["mala"].empty(), name
            assert crew.works()


# Uploads and downloads


OTHER_SHAPE = wire.Layout((("bias", torch.float32, (3,)), ("weight", torch.float32, (4, 2))))
HOSTILE_UPLOADS: dict[str, list[object]] = {
    "no blob": uploaded(upload()),
    "no chunk": [upload(), wire.encode(HELLO)],
    "noise": uploaded(upload(), b"\xff" * 1000),
    "another shape": uploaded(upload(), OTHER_SHAPE.header + WHOLE[len(OTHER_SHAPE.header) :]),
    "no header": uploaded(upload(), bytes(len(WHOLE))),
    "too much": uploaded(upload(), WHOLE, b"x"),
    "too much at once": uploaded(upload(), WHOLE + bytes(3 * MIB)),
    "too little": uploaded(upload(), WHOLE[:-1]),
    "no end": [upload(), wire.DATA + WHOLE[:-1]],
    "5 MiB in a chunk": uploaded(upload(), bytes(5 * MIB)),
    **{
        f"{name} {value}": uploaded(
            said("Contribution", **{"lease_id": 1, "tokens": 1, "loss_sum": 1.0, name: value}), WHOLE
        )
        for name, value in (
            *(("transfer_seconds", seconds) for seconds in (math.nan, math.inf, -3.0)),
            *(("loss_sum", loss) for loss in (math.nan, -math.inf)),
            *(("tokens", tokens) for tokens in (-1, HUGE)),
            ("lease_id", HUGE),
        )
    },
}


def test_hostile_uploads_are_refused(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client, memory_stays(64 * MIB):
        for name, messages in HOSTILE_UPLOADS.items():
            client.say(HELLO, *messages)
            assert isinstance(crew.heard.next("mala"), Hello)
            assert crew.heard.messages["mala"].empty(), name
            assert crew.works()
        client.say(HELLO, upload(valid=False))
        assert isinstance(crew.heard.next("mala"), Hello)
        assert crew.heard.next("mala") == upload(valid=False)


def buffers() -> list[memoryview]:
    return [item for item in gc.get_objects() if type(item) is memoryview and item.nbytes == BIG.num_bytes]


def test_a_node_has_one_upload_at_a_time(big_crew: Crew) -> None:
    """Or a node that begins a thousand takes a thousand times the model's memory."""
    crew, identity, count = big_crew, big_crew.node("mala"), 12
    chunks = [BIG.header.ljust(MIB, bytes(1)), *(bytes(MIB) for _ in range(7))]
    begun, held = [*map(raw, [HELLO, *uploaded(upload(), *chunks)])][:-1], []
    with abuser(crew, identity) as client:
        calls = []
        for _ in range(count):
            held.append(Held(begun))
            calls.append(client.stream("Session", held[-1]))
        try:
            wait_for(lambda: all(each.waits.is_set() for each in held))
            wait_for(lambda: crew.server._sessions["mala"].chunks >= 8 and len(buffers()) <= 1)
        finally:
            for each in held:
                each.more.put(None)
            for call in calls:
                call.cancel()
    assert crew.works()


NOT_OFFERED = ("", "../crew/coordinator.json", "/etc/passwd", "file.bin", "ñ", "x" * MIB)


def test_downloads_from_beyond_the_end_and_of_what_is_not_offered(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    assert crew.works()  # makes version 1
    with abuser(crew, crew.node("mala")) as client:
        for offset in (0, 499, 500, 501, 2**31, 2**63, HUGE):
            for wanted in ({"version": 1}, {"sha256": (b"f" * 32).hex()}):
                got = client.status("Call", [said("Download", **wanted, offset=offset)])
                assert got in ("OK", "INVALID_ARGUMENT"), (wanted, offset)
        for name in NOT_OFFERED:
            assert client.status("Call", [said("Download", sha256=name)]) == "INVALID_ARGUMENT", name[:80]
        assert client.status("Call", [Download(version=0)]) == "INVALID_ARGUMENT"
    assert "Traceback" not in caplog.text
    assert crew.works()


def test_each_chunk_of_an_upload_is_progress(big_crew: Crew) -> None:
    """On a slow line heartbeats wait behind an upload: what arrives of it must count, or the worker is lost."""
    assert big_crew.works()
    heard = big_crew.heard.progress["ana"]
    num_chunks = math.ceil(BIG.num_bytes / wire.CHUNK_BYTES)
    assert num_chunks > 2
    assert heard == sorted(heard)
    assert set(range(1, num_chunks + 1)) <= set(heard)


# Reports of how a machine is: nothing of the training depends on them


def test_a_worker_tells_how_its_machine_is(crew: Crew) -> None:
    crew.session.call(NodeReport(phase="sending", lines=(SaidLine(level="warning", text="hot"),)))
    wait_for(lambda: bool(crew.heard.reports["ana"]))
    assert crew.heard.reports["ana"][0].lines == (SaidLine(level="warning", text="hot"),)
    assert 0 < (crew.session.round_trip() or 0) < CEILING_SECONDS
