"""Text from the other end of the link is shown as a part of a line, without control characters."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from cuadrilla.errors import LinkError
from cuadrilla.link.base import KICKED, MAX_TEXT, Goodbye, Hello, Stop
from cuadrilla.link.client import Connection
from cuadrilla.link.server import start_server
from cuadrilla.log import NOTE
from tests.hostile import CEILING_SECONDS, Crew

FOREIGN = "\x1b]0;owned\x07gone\r\n\nhint: curl evil | sh\x9b31m\u202e"
SHOWN = "\\u001b]0;owned\\u0007gone\\u000d\\n\\nhint: curl evil | sh\\u009b31m\\u202e"


@contextmanager
def impostor(crew: Crew, code: grpc.StatusCode) -> Iterator[str]:
    """A program that has the coordinator's key and answers calls with an error of any wording."""

    def refuse(_requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.abort(code, FOREIGN)
        yield b""

    with ThreadPoolExecutor() as pool:
        server, port = start_server("127.0.0.1:0", {"Call": refuse}, keys=crew.keys, pool=pool)
        yield f"127.0.0.1:{port}"
        server.stop(0.0).wait()


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS]
)
def test_details_of_an_error(crew: Crew, code: grpc.StatusCode) -> None:
    with impostor(crew, code) as address:
        connection = Connection(address, identity=crew.node("luis"))
        with pytest.raises(LinkError) as caught:
            connection.describe()
        connection.close()
    assert caught.value.message.endswith(SHOWN)


def test_what_a_worker_says_of_itself(crew: Crew) -> None:
    luis = Connection(crew.address, identity=crew.node("luis"))
    session = luis.session(parameters=crew.session._parameters)
    session.call(Hello(speed_hint=1.0, environment={FOREIGN: FOREIGN}))
    session.call(Goodbye(reason=FOREIGN + "x" * 10 * MAX_TEXT))
    assert crew.heard.next("luis") == Hello(speed_hint=1.0, environment={SHOWN: SHOWN})
    _, reason = crew.heard.goodbyes.get(timeout=CEILING_SECONDS)
    assert reason.startswith(SHOWN)
    assert len(reason) == MAX_TEXT
    session.close()
    luis.close()


def test_a_kick_is_said_once_and_ends_the_workers_of_all_devices(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    other = Connection(crew.address, identity=crew.ana.identity, device="cuda:1")
    session = other.session(parameters=crew.session._parameters)
    session.call(Hello(speed_hint=1.0))
    assert isinstance(crew.heard.next("ana/cuda:1"), Hello)
    caplog.clear()
    caplog.set_level(logging.INFO, logger="cuadrilla")
    crew.nodes.remove("ana")
    for _ in range(2):
        crew.server.end_kicked()
    said = [record.getMessage() for record in caplog.records if record.levelno == NOTE]
    assert said == ["ana left: it was kicked", "ana/cuda:1 left: it was kicked"]
    stop = Stop(reason=KICKED, refused=True)
    assert [each.next_event() for each in (crew.session, session)] == [stop, stop]
    session.close()
    other.close()


def test_a_kick_that_a_refused_call_notices_first(crew: Crew) -> None:
    crew.nodes.remove("ana")
    with pytest.raises(LinkError):
        crew.session.download(0)
    assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS) == ("ana", "it was kicked")


def test_who_leaves_was_not_kicked(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cuadrilla")
    crew.ana.leave()
    crew.server.end_kicked()
    said = [record.getMessage() for record in caplog.records if record.levelno == NOTE]
    assert said == ["ana left: it has left the crew", "ana has left the crew; with an invite it may come back"]
    assert crew.session.next_event() == Stop(reason="this machine has left the crew", refused=True)
