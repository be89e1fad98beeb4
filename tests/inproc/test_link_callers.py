"""Permissions of callers, enrolling, exhaustion of shared resources, and one identity on two connections."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import (
    Check,
    Contribution,
    Describe,
    Download,
    Enroll,
    Follow,
    Goodbye,
    Hello,
    Leave,
    Missing,
    Refused,
    Stop,
)
from cuadrilla.link.client import FROM_COORDINATOR, Connection
from cuadrilla.link.identity import Identity
from tests.commands import wait_for
from tests.hostile import CEILING_SECONDS, LAYOUT, PARAMETERS, WHOLE, Abuser, Crew, Held, raw, upload

ELSEWHERE = "127.0.0.2:47470"

# Permissions of callers

LET_IN: dict[object, str] = {"Session": "OK", Describe(): "OK", Check(): "OK"}
LET_IN |= {Download(path="x"): "INVALID_ARGUMENT", b"": "INVALID_ARGUMENT"}
LET_IN |= dict.fromkeys([Follow(address=ELSEWHERE), Download(path="journal/v00000001.step")], "PERMISSION_DENIED")
LET_IN |= {Leave(): "OK"}  # the last method that it can call
"""Status of each call of a listed node without a session. It is no standby."""


REFUSED = "PERMISSION_DENIED"


def caller(kind: str, crew: Crew) -> Identity:
    match kind:
        case "node":
            return crew.node("luis")
        case "kicked":
            identity = crew.node("luis")
            crew.nodes.remove("luis")
            return identity
        case "nearly right":
            return replace(crew.stranger, token=crew.node("luis").token[:-1] + "~")
    return crew.stranger


@pytest.mark.parametrize("kind", ["node", "kicked", "nearly right", "stranger"])
def test_who_may_call_what(crew: Crew, kind: str) -> None:
    """The secret of an open invite allows only `Enroll`. A node's token allows everything else."""
    secret = crew.server.invites.issue(uses=5)
    with closing(Abuser(crew, caller(kind, crew))) as client:
        message = Enroll(name="berta")
        assert client.status("Call", [message], secret=secret[:-1]) == REFUSED
        assert client.status("Call", [Describe()], secret=secret) == "INVALID_ARGUMENT"
        assert client.status("Session", [], secret=secret) == LET_IN["Session"] if kind == "node" else REFUSED
        got = {
            asked: client.status("Session", []) if asked == "Session" else client.status("Call", [asked])
            for asked in (*LET_IN, message)
        }
        let_in = {**LET_IN, message: REFUSED}
        assert got == (let_in if kind == "node" else dict.fromkeys(let_in, REFUSED))
        assert "berta" not in crew.nodes.nodes()
        assert client.status("Call", [message], secret=secret) == "OK"
    assert "berta" in crew.nodes.nodes()
    assert crew.works()


# Enrolling


def test_a_refused_name_uses_no_invite_up(crew: Crew) -> None:
    secret = crew.server.invites.issue(uses=1)
    with closing(Connection(crew.address, identity=crew.stranger)) as connection:
        for _ in range(3):
            with pytest.raises(LinkError, match="'Ana' cannot be the name of a node"):
                connection.enroll("Ana", secret=secret)
        assert connection.enroll("ana", secret=secret)[0] == "ana-2"
    assert crew.works()


def test_who_leaves_is_a_node_no_more_and_the_name_is_free(tmp_path: Path) -> None:
    """It is no standby any more either, although its name was named: another machine may get that name next."""
    crew = Crew(tmp_path, standbys=frozenset({"eva"}))
    connection = Connection(crew.address, identity=crew.node("eva"))
    assert connection.reply(Follow(address=ELSEWHERE), Missing)
    session = connection.session(parameters=[LAYOUT])
    session.call(Hello(speed_hint=1.0))
    assert isinstance(crew.heard.next("eva"), Hello)
    connection.leave()
    with pytest.raises(Refused, match="not in the crew"):
        connection.leave()
    crew.server.end_kicked()
    assert crew.workers() == ["ana"]
    session.close()
    connection.close()
    with closing(Connection(crew.address, identity=crew.node("eva"))) as again:  # another key
        assert again.describe().config
        with pytest.raises(Refused, match="has not been named as a standby"):
            again.reply(Follow(address=ELSEWHERE), Missing)
    assert crew.works()
    crew.close()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("followed", [False, True])
def test_the_name_of_a_kicked_standby_is_nobodys(tmp_path: Path, at_once: bool, followed: bool) -> None:
    """The next machine of that name cannot follow: neither if it comes `at_once`, before the coordinator has noticed
    the kick, nor if the kicked one never followed. A standby that comes with another invite is still the same."""
    crew = Crew(tmp_path, standbys=frozenset({"eva"}))
    secret = crew.server.invites.issue(uses=5)

    def enroll(identity: Identity) -> Identity:
        with closing(Connection(crew.address, identity=identity)) as connection:
            name, token = connection.enroll("eva", secret=secret)
        assert name == "eva"
        return replace(identity, token=token)

    def follow(identity: Identity) -> Missing:
        with closing(Connection(crew.address, identity=identity)) as connection:
            return connection.reply(Follow(address=ELSEWHERE), Missing)

    eva = enroll(crew.stranger)
    if followed:
        assert "coordinator.json" in follow(eva).crew_files
        eva = enroll(eva)
        assert "coordinator.json" in follow(eva).crew_files
    crew.nodes.remove("eva")
    if not at_once:
        crew.server.end_kicked()
    other = enroll(crew.stranger)
    with pytest.raises(Refused, match="has not been named as a standby"):
        follow(other)
    assert crew.server._standby.addresses == {}
    assert crew.works()
    crew.close()


# Exhaustion of shared resources

NUM_STALLED = 300
"""More than the server has threads."""


@pytest.mark.parametrize(("kind", "method"), [("stranger", "Call"), ("node", "Session")])
def test_calls_that_are_never_finished_stop_nobody_else(crew: Crew, kind: str, method: str) -> None:
    """Calls without a message, ten on each connection. After each of them another node still gets its answer."""
    identity = crew.node("mala") if kind == "node" else crew.stranger
    held, clients, calls = Held([]), [], []
    try:
        for number in range(NUM_STALLED):
            if number % 10 == 0:
                clients.append(Abuser(crew, identity))
            calls.append(clients[-1].stream(method, held))
            assert crew.ana.describe().config
        assert crew.works()
    finally:
        for call in calls:
            held.more.put(None)
            call.cancel()
        for client in clients:
            client.close()


# One identity, two connections


def test_a_newer_session_fences_the_older_one(crew: Crew) -> None:
    identity = crew.node("mala")
    older = Held([raw(Hello(speed_hint=1.0)), raw(upload()), WHOLE[:20]])
    with closing(Abuser(crew, identity)) as client:
        old = client.stream("Session", older)
        assert isinstance(crew.heard.next("mala"), Hello)
        assert older.waits.wait(CEILING_SECONDS)
        wait_for(lambda: crew.server._sessions["mala"].chunks == 1)
        assert crew.works()
        connection = Connection(crew.address, identity=identity)
        newer = connection.session(parameters=[LAYOUT])
        newer.call(Hello(speed_hint=2.0))
        hello = crew.heard.next("mala")
        assert isinstance(hello, Hello)
        assert hello.speed_hint == 2.0
        late = (WHOLE[20:], Goodbye(reason="late"), Hello(speed_hint=3.0))
        for message in map(raw, late):
            older.more.put(message)
        told = [wire.decode(answer, *FROM_COORDINATOR) for answer in old]
        assert [isinstance(answer, Stop) and answer.refused for answer in told] == [True]
        newer.call(Contribution(lease_id=2, tokens=1, loss_sum=1.0, tensors=PARAMETERS))
        answer = crew.heard.next("mala")
        assert isinstance(answer, Contribution)  # and not the late Goodbye, nor the late Hello
        assert answer.lease_id == 2  # what the older session uploaded counts no more
        assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
        assert crew.workers() == ["ana", "mala"]
        older.more.put(None)
        newer.close()
        connection.close()
    wait_for(lambda: crew.workers() == ["ana"])
    assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
    assert crew.heard.goodbyes.empty()
    assert crew.works()
