"""Who may call what, guessing invites, using up what is shared, one identity on two connections."""

import contextlib
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import Contribution, Goodbye, Hello, Lease, Refused
from cuadrilla.link.grpc_calls import MAX_CALLS, MAX_CALLS_OF_AN_ADDRESS
from cuadrilla.link.grpc_client import Connection
from cuadrilla.link.grpc_server import NEWS_AT_ONCE, NEWS_PER_SECOND
from cuadrilla.link.invite import MAX_WRONG_TRIES, hash_secret, new_secret
from cuadrilla.link.names import MAX_DEVICES
from cuadrilla.link.tls import Identity, enrol_identity, node_request, open_coordinator
from tests.crews import join, pem_of
from tests.hostile import (
    CEILING_SECONDS,
    HUGE,
    LAYOUT,
    MIB,
    PARAMETERS,
    WHOLE,
    Abuser,
    Crew,
    Held,
    abuser,
    chunk,
    first_chunk,
    hello_bytes,
    to,
    wait_for,
)

# Who may call what

LET_IN = {"Describe": "OK", "Session": "OK", "Upload": "FAILED_PRECONDITION", "Download": "NOT_FOUND"}
LET_IN |= {"Check": "OK", "Receive": "OK", "Send": "OK", "Average": "INVALID_ARGUMENT"}
LET_IN |= dict.fromkeys(("Keys", "Growth", "Copy"), "PERMISSION_DENIED")  # for standbys that were named
LET_IN |= {"Leave": "OK"}  # the last one that it can call
"""What a listed node without a session gets: the method itself answers."""


def certificate_for(name: str, crew: Crew, *, begins: timedelta, ends: timedelta, own: bool = False) -> Identity:
    """Signed by the crew's CA, or by a key that only calls itself so."""
    ca, now = x509.load_pem_x509_certificate(crew.keys.identity.ca), datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
        .sign(key if own else crew.keys.ca_key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    crew.nodes.add(name, certificate=pem)
    return Identity(key=pem_of(key), certificate=pem, ca=crew.keys.identity.ca)


def caller(kind: str, crew: Crew) -> Identity | None:
    day = timedelta(days=1)
    match kind:
        case "node":
            return crew.node("luis")
        case "kicked":
            identity = crew.node("luis")
            crew.nodes.remove("luis")
            return identity
        case "never let in":
            return join(crew.folder / "luis", name="luis", crew=crew.keys)
        case "of another crew":
            other = open_coordinator(crew.folder / "other", now=datetime.now(UTC))
            identity = join(crew.folder / "luis", name="luis", crew=other)
            crew.nodes.add("luis", certificate=identity.certificate)
            return identity
        case "expired":
            return certificate_for("luis", crew, begins=-2 * day, ends=-day)
        case "not yet valid":
            return certificate_for("luis", crew, begins=day, ends=2 * day)
        case "self-made":
            return certificate_for("luis", crew, begins=-day, ends=day, own=True)
        case "enrol":
            return enrol_identity(crew.keys.identity.certificate)
    return None


def common_name(certificate: bytes) -> str:
    [found] = x509.load_pem_x509_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found.value)


REFUSED = "PERMISSION_DENIED"
NO_TLS = "UNAVAILABLE"  # the handshake fails: no method is reached


@pytest.mark.parametrize(
    ("kind", "enroll", "others"),
    [
        ("node", REFUSED, None),
        ("enrol", "OK", REFUSED),
        ("kicked", REFUSED, REFUSED),
        ("never let in", REFUSED, REFUSED),
        ("of another crew", NO_TLS, NO_TLS),
        ("expired", NO_TLS, NO_TLS),
        ("not yet valid", NO_TLS, NO_TLS),
        ("self-made", NO_TLS, NO_TLS),
        ("nobody", NO_TLS, NO_TLS),
    ],
)
def test_who_may_call_what(crew: Crew, kind: str, enroll: str, others: str | None) -> None:
    """Each with the right secret of an open invite in its hand; being in the allow-list does not help a forger."""
    secret = new_secret()
    crew.server.adopt_invites({hash_secret(secret): 5})
    request = node_request(crew.folder / "berta", name="berta")
    with abuser(crew, caller(kind, crew)) as client:
        got = {
            method: client.status(method, [] if method in ("Session", "Upload", "Send") else [b""]) for method in LET_IN
        }
        assert got == {method: others or LET_IN[method] for method in LET_IN}
        message = pb.EnrolRequest(secret=secret, certificate_request=request)
        assert client.status("Enroll", [message]) == enroll
    assert ("berta" in crew.nodes.nodes()) == (enroll == "OK")
    assert crew.works()


def test_methods_that_do_not_exist(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client:
        for method in ("", "Shell", "session", "../Session", "x" * 4000):
            assert client.status(method, [b""]) == "UNIMPLEMENTED"


# Guessing invites


def test_guesses_close_every_invite(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    """300 over the network; ten thousand against the state machine are in test_invite.py."""
    secret = new_secret()
    crew.server.adopt_invites({hash_secret(secret): 5})
    stranger = enrol_identity(crew.keys.identity.certificate)
    connection = Connection(crew.address, identity=stranger)
    request = node_request(crew.folder / "berta", name="berta")
    reasons = []
    with caplog.at_level(logging.WARNING, logger="cuadrilla"):
        for guess in range(300):
            with pytest.raises(Refused) as caught:
                connection.enroll(secret=guess.to_bytes(20, "big"), request=request)
            reasons.append(caught.value.message)
        with pytest.raises(Refused, match="closed after wrong tries"):
            connection.enroll(secret=secret, request=request)
    connection.close()
    assert set(reasons) == {"the coordinator refused: the secret is not from this crew"}
    assert any("all invites are closed" in record.message for record in caplog.records)
    assert list(crew.nodes.nodes()) == ["ana"]
    assert crew.works()


def test_guesses_do_not_fill_the_log(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    """After the invites are closed a guess is no news any more."""
    crew.server.adopt_invites({hash_secret(new_secret()): 1})
    connection = Connection(crew.address, identity=enrol_identity(crew.keys.identity.certificate))
    request = node_request(crew.folder / "berta", name="berta")
    with caplog.at_level(logging.WARNING, logger="cuadrilla"):
        for guess in range(100):
            with pytest.raises(Refused):
                connection.enroll(secret=guess.to_bytes(20, "big"), request=request)
    connection.close()
    assert len(caplog.records) <= 4 * MAX_WRONG_TRIES


def test_a_refused_name_uses_no_invite_up(crew: Crew) -> None:
    secret = new_secret()
    crew.server.adopt_invites({hash_secret(secret): 1})
    connection = Connection(crew.address, identity=enrol_identity(crew.keys.identity.certificate))
    request = node_request(crew.folder / "clone", name="ana")
    for _ in range(3):
        with pytest.raises(Refused, match="another machine is in this crew under the name ana") as caught:
            connection.enroll(secret=secret, request=request)
        assert "join --name" in caught.value.hint
    enrolled = connection.enroll(secret=secret, request=request, numbered=True)
    with pytest.raises(Refused, match="has been used"):
        connection.enroll(secret=secret, request=request, numbered=True)
    connection.close()
    assert enrolled.name == "ana-2"
    assert crew.nodes.name_of(enrolled.certificate) == "ana-2"
    assert common_name(enrolled.certificate) == "ana-2"
    assert crew.works()


def test_many_machines_of_one_name_at_once(crew: Crew) -> None:
    secret = new_secret()
    crew.server.adopt_invites({hash_secret(secret): MAX_CALLS_OF_AN_ADDRESS})
    stranger = enrol_identity(crew.keys.identity.certificate)

    def enrol(number: int) -> str:
        connection = Connection(crew.address, identity=stranger)
        request = node_request(crew.folder / f"clone-{number}", name="aula")
        try:
            return connection.enroll(secret=secret, request=request, numbered=True).name
        finally:
            connection.close()

    with ThreadPoolExecutor(MAX_CALLS_OF_AN_ADDRESS) as pool:
        names = sorted(pool.map(enrol, range(MAX_CALLS_OF_AN_ADDRESS)))
    assert names == ["aula", *(f"aula-{number}" for number in range(2, MAX_CALLS_OF_AN_ADDRESS + 1))]
    assert crew.works()


def test_who_leaves_is_a_node_no_more_and_the_name_is_free(tmp_path: Path) -> None:
    """Also no standby, although its name was named: another machine may have it next."""
    crew = Crew(tmp_path, standbys=frozenset({"eva"}))
    connection = Connection(crew.address, identity=crew.node("eva"))
    assert connection.crew_keys()
    session = connection.session(parameters=LAYOUT)
    session.call(Hello(speed_hint=1.0))
    assert isinstance(crew.heard.next("eva"), Hello)
    connection.leave()
    with pytest.raises(Refused, match="not in the crew"):
        connection.leave()
    crew.server.end_kicked()
    assert crew.server.workers() == ["ana"]
    session.close()
    connection.close()
    shutil.rmtree(crew.folder / "eva")
    again = Connection(crew.address, identity=crew.node("eva"))  # another key
    assert again.describe().config
    with pytest.raises(Refused, match="has not been named as a standby"):
        again.crew_keys()
    again.close()
    assert crew.works()
    crew.close()


HOSTILE_ENROLMENTS = {
    "nothing": pb.EnrolRequest(),
    "a request of 3 MiB": pb.EnrolRequest(certificate_request=b"-----BEGIN" + b"A" * 3 * MIB),
    "a secret of 3 MiB": pb.EnrolRequest(secret=b"s" * 3 * MIB),
    "noise": b"\xff" * 1000,
    "5 MiB": pb.EnrolRequest(secret=b"s" * 5 * MIB),
}


def test_hostile_enrolments(crew: Crew) -> None:
    crew.server.adopt_invites({hash_secret(new_secret()): 1})
    with abuser(crew, enrol_identity(crew.keys.identity.certificate)) as client:
        got = {name: client.status("Enroll", [message]) for name, message in HOSTILE_ENROLMENTS.items()}
    assert set(got.values()) <= {REFUSED, "INVALID_ARGUMENT", "INTERNAL", "RESOURCE_EXHAUSTED"}
    assert list(crew.nodes.nodes()) == ["ana"]
    assert crew.works()


# Using up what is shared

NUM_STALLED = 300
"""More than the threads of the server."""


@pytest.mark.parametrize(
    ("kind", "method"),
    [("enrol", "Enroll"), ("enrol", "Describe"), ("node", "Describe"), ("node", "Upload"), ("node", "Session")],
)
def test_calls_that_are_never_finished_stop_nobody_else(crew: Crew, kind: str, method: str) -> None:
    """Calls without a message, ten on a connection; another node is answered after each of them."""
    crew.server.adopt_invites({hash_secret(new_secret()): 1})
    identity = crew.node("mala") if kind == "node" else enrol_identity(crew.keys.identity.certificate)
    held, clients, calls = Held([]), [], []
    answered = 0
    try:
        for number in range(NUM_STALLED):
            if number % 10 == 0:
                clients.append(Abuser(crew, identity))
            calls.append(clients[-1].stream(method, held))
            with contextlib.suppress(LinkError):
                crew.ana.describe()
                answered += 1
                continue
            break
        if answered == NUM_STALLED:
            assert crew.works()
    finally:
        for call in calls:
            held.more.put(None)
            call.cancel()
        for client in clients:
            client.close()
    assert answered == NUM_STALLED


SAID = {
    "hello": hello_bytes(),
    "an answer without a lease": to(contribute=pb.Contribute(lease_id=HUGE)).SerializeToString(),
    "goodbye": to(goodbye=pb.Goodbye(reason="x" * 1000)).SerializeToString(),
}


@pytest.mark.parametrize("said", SAID.values(), ids=list(SAID))
def test_what_no_work_needs_is_paced(crew: Crew, said: bytes) -> None:
    """Each is an event in a file, or a step of the coordinator."""
    most = int(NEWS_AT_ONCE)
    with abuser(crew, crew.node("mala")) as client:
        told = client.say(hello_bytes(), *[said] * (2 * most))
        assert told[-1].stop.refused
        assert crew.heard.messages["mala"].qsize() < most
        assert client.status("Session", []) == "RESOURCE_EXHAUSTED"
        crew.now += 1.01 / NEWS_PER_SECOND
        assert client.status("Session", []) == "OK"
        assert client.status("Session", []) == "RESOURCE_EXHAUSTED"
    for _ in range(2 * most):  # who works is not slowed
        assert crew.works()


def test_sessions_are_paced(crew: Crew) -> None:
    with abuser(crew, crew.node("mala")) as client:
        got = [client.status("Session", []) for _ in range(2 * int(NEWS_AT_ONCE))]
    assert got.count("OK") == NEWS_AT_ONCE
    assert set(got) == {"OK", "RESOURCE_EXHAUSTED"}
    assert crew.works()


# One identity, two connections


def test_a_newer_session_fences_the_older_one(crew: Crew) -> None:
    identity = crew.node("mala")
    older, late = Held([hello_bytes()]), Held([first_chunk(WHOLE[:20]).SerializeToString()])
    with abuser(crew, identity) as client:
        old = client.stream("Session", older)
        assert isinstance(crew.heard.next("mala"), Hello)
        upload = client.stream("Upload", late)
        assert late.waits.wait(CEILING_SECONDS)
        assert crew.works()
        connection = Connection(crew.address, identity=identity)
        newer = connection.session(parameters=LAYOUT)
        newer.call(Hello(speed_hint=2.0))
        hello = crew.heard.next("mala")
        assert isinstance(hello, Hello)
        assert hello.speed_hint == 2.0
        for message in (Goodbye(reason="late"), Hello(speed_hint=3.0)):
            older.more.put(wire.to_coordinator(message).SerializeToString())
        told = [pb.ToWorker.FromString(answer) for answer in old]
        assert [answer.stop.refused for answer in told] == [True]
        late.more.put(chunk(WHOLE[20:]).SerializeToString())
        late.more.put(None)
        for _ in upload:
            pass
        newer._outgoing.put(to(contribute=pb.Contribute(lease_id=1, tokens=1, loss_sum=1.0, upload="u", valid=True)))
        answer = crew.heard.next("mala")
        assert isinstance(answer, Contribution)  # and not the late Goodbye, nor the late Hello
        assert not answer.valid  # what the older session uploaded is not the newer one's
        assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
        assert crew.server.workers() == ["ana", "mala"]
        older.more.put(None)
        newer.close()
        connection.close()
    wait_for(lambda: crew.server.workers() == ["ana"])
    assert crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "mala"
    assert crew.heard.goodbyes.empty()
    assert crew.works()


def test_many_connections_of_one_identity_are_one_worker(crew: Crew) -> None:
    identity = crew.node("mala")
    clients, calls, helds = [], [], []
    for number in range(20):
        clients.append(Abuser(crew, identity))
        helds.append(Held([wire.to_coordinator(Hello(speed_hint=number + 1.0)).SerializeToString()]))
        calls.append(clients[-1].stream("Session", helds[-1]))
        assert isinstance(crew.heard.next("mala"), Hello)
    assert crew.server.workers() == ["ana", "mala"]
    for call in calls[:-1]:
        assert [pb.ToWorker.FromString(answer).stop.refused for answer in call] == [True]
    for held, client in zip(helds, clients, strict=True):
        held.more.put(None)
        client.close()
    wait_for(lambda: crew.server.workers() == ["ana"])
    assert crew.works()


# One identity, several devices


def test_a_node_has_a_worker_for_each_of_its_devices(crew: Crew) -> None:
    """Each with messages, uploads and an end of its own; who kicks the node ends all of them."""
    identity = crew.node("mala")
    devices = ["cuda:0", "cuda:1", "cpu", "cpu.2"]
    connections = [Connection(crew.address, identity=identity, device=device) for device in devices]
    sessions = [connection.session(parameters=LAYOUT) for connection in connections]
    for number, (device, session) in enumerate(zip(devices, sessions, strict=True), start=1):
        session.call(Hello(speed_hint=float(number)))
        hello = crew.heard.next(f"mala/{device}")
        assert isinstance(hello, Hello)
        assert hello.speed_hint == number
    assert crew.server.workers() == ["ana", *sorted(f"mala/{device}" for device in devices)]
    crew.server.send("mala/cpu", Lease(lease_id=3, version=0, units=(1,), planned_tokens=1))
    assert isinstance(sessions[2].next_event(), Lease)
    sessions[2].call(Contribution(lease_id=3, tokens=1, loss_sum=1.0, tensors=PARAMETERS))
    stolen = pb.Contribute(lease_id=4, tokens=1, loss_sum=1.0, upload="upload-1", valid=True)
    sessions[3]._outgoing.put(to(contribute=stolen))
    strange = crew.heard.next("mala/cpu.2")
    assert isinstance(strange, Contribution)
    assert not strange.valid  # what another device uploaded is not this one's
    answer = crew.heard.next("mala/cpu")
    assert isinstance(answer, Contribution)
    assert answer.valid
    sessions[0].call(Goodbye(reason="done"))
    assert isinstance(crew.heard.next("mala/cuda:0"), Goodbye)
    wait_for(lambda: "mala/cuda:0" not in crew.server.workers())
    crew.nodes.remove("mala")
    crew.server.end_kicked()
    gone = {crew.heard.goodbyes.get(timeout=CEILING_SECONDS)[0] for _ in devices[1:]}
    assert gone == {f"mala/{device}" for device in devices[1:]}
    wait_for(lambda: crew.server.workers() == ["ana"])
    for session, connection in zip(sessions, connections, strict=True):
        session.close()
        connection.close()
    assert crew.works()


@pytest.mark.parametrize("device", ["../ana", "ana", "cuda:0/1", "cuda:100", "CPU", "x" * 200, "cpu.22", "cpu.1", "-"])
def test_a_device_has_a_plain_name(crew: Crew, device: str) -> None:
    with abuser(crew, crew.node("mala")) as client:
        assert client.status("Session", [hello_bytes()], device=device) == "INVALID_ARGUMENT"
    assert crew.works()


def test_a_node_has_so_many_devices_at_most(crew: Crew) -> None:
    names = [f"cuda:{number}" for number in range(12)]
    with abuser(crew, crew.node("mala")) as client:
        helds = [Held([hello_bytes()]) for _ in range(MAX_DEVICES)]
        calls = [client.stream("Session", held, device=name) for name, held in zip(names, helds, strict=False)]
        wait_for(lambda: len(crew.server.workers()) == 1 + MAX_DEVICES)
        for name in names[MAX_DEVICES:]:
            assert client.status("Session", [hello_bytes()], device=name) == "PERMISSION_DENIED"
        assert crew.works()
        for held, call in zip(helds, calls, strict=True):
            held.more.put(None)
            call.cancel()
    wait_for(lambda: crew.server.workers() == ["ana"])


def test_the_calls_of_a_node_are_counted_over_its_devices(crew: Crew) -> None:
    identity = crew.node("mala")
    clients = [Abuser(crew, identity) for _ in range(6)]
    helds = [Held([]) for _ in range(72)]
    calls = [
        clients[number % 6].stream("Download", held, device=f"xpu:{number // 6}") for number, held in enumerate(helds)
    ]
    wait_for(lambda: sum(call.done() for call in calls) >= len(calls) - MAX_CALLS * MAX_DEVICES)
    assert {call.code().name for call in calls if call.done()} == {"RESOURCE_EXHAUSTED"}
    assert crew.works()
    for held in helds:
        held.more.put(None)
    for client in clients:
        client.close()


@pytest.mark.thorough
def test_two_hundred_workers_fit_into_a_crew(crew: Crew) -> None:
    """Each has a session of its own over a connection of its own; then all of them leave.

    They come one after another, since of an address that is not known yet the gate has seats for sixteen. They are
    patient, since it lets twenty a second in.
    """
    names = [f"pc-{number}" for number in range(200)]
    clients, helds, calls = [], [], []
    for name in names:
        clients.append(Abuser(crew, crew.node(name)))
        helds.append(Held([wire.to_coordinator(Hello(speed_hint=1.0)).SerializeToString()]))
        calls.append(clients[-1].stream("Session", helds[-1], patient=True))
        assert isinstance(crew.heard.next(name), Hello)
    assert set(crew.server.workers()) == {"ana", *names}
    assert crew.works()
    for held, client in zip(helds, clients, strict=True):
        held.more.put(None)
        client.close()
    wait_for(lambda: crew.server.workers() == ["ana"])
    assert crew.works()
