"""Hostile messages, uploads and downloads of a member of the crew cause an error of ours, or have no effect."""

import json
import math
from contextlib import closing
from pathlib import Path

import pytest
import torch

from cuadrilla.link import wire
from cuadrilla.link.base import Download, Hello, Lease, Stop
from tests.hostile import BIG, CEILING_SECONDS, HUGE, MIB, WHOLE, Abuser, Crew, memory_stays, upload, uploaded


def said(kind: str, **fields: object) -> bytes:
    """The bytes of a message, with any values."""
    return f"{kind} {json.dumps(fields)}".encode()


HELLO = Hello(speed_hint=1.0)
ENDED_BY: dict[str, object] = {
    "nothing": b"",
    "noise": b"\xfa\x7f\x02hi",
    "an unknown kind": said("Shutdown", reason="x"),
    "what only coordinators say": Lease(lease_id=1, version=1, units=(1,), planned_tokens=1),
    "bytes that belong to nothing": WHOLE,
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
    with closing(Abuser(crew, crew.node("mala"))) as client:
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
    "too much": uploaded(upload(), WHOLE + bytes(3 * MIB)),
    "too little": uploaded(upload(), WHOLE[:-1]),
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
    with closing(Abuser(crew, crew.node("mala"))) as client, memory_stays(64 * MIB):
        for name, messages in HOSTILE_UPLOADS.items():
            client.say(HELLO, *messages)
            assert isinstance(crew.heard.next("mala"), Hello)
            assert crew.heard.messages["mala"].empty(), name
            assert crew.works()
        client.say(HELLO, upload(valid=False))
        assert isinstance(crew.heard.next("mala"), Hello)
        assert crew.heard.next("mala") == upload(valid=False)


NOT_OFFERED = ("", "../crew/coordinator.json", "/etc/passwd", "crew/file.bin", "ñ", "x" * MIB)


def test_downloads_from_beyond_the_end_and_of_what_is_not_offered(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    assert crew.works()  # makes version 1
    with closing(Abuser(crew, crew.node("mala"))) as client:
        for offset in (0, 499, 500, 501, 2**31, 2**63, HUGE):
            for wanted in ({"version": 1}, {"path": "file.bin"}):
                got = client.status("Call", [said("Download", **wanted, offset=offset)])
                assert got in ("OK", "INVALID_ARGUMENT"), (wanted, offset)
        for name in NOT_OFFERED:
            assert client.status("Call", [said("Download", path=name)]) == "INVALID_ARGUMENT", name[:80]
        assert client.status("Call", [Download(version=0)]) == "INVALID_ARGUMENT"
    assert "Traceback" not in caplog.text
    assert crew.works()


def test_each_chunk_of_an_upload_is_progress(tmp_path: Path) -> None:
    """On a slow link heartbeats wait behind an upload. Arriving parts must count as signs of life, else it is lost."""
    with closing(Crew(tmp_path, contribution=BIG)) as crew:
        assert crew.works()
        heard = list(crew.heard.progress["ana"])
    num_chunks = math.ceil(BIG.num_bytes / wire.CHUNK_BYTES)
    assert num_chunks > 2
    assert heard == sorted(heard)
    assert set(range(1, num_chunks + 1)) <= set(heard)
