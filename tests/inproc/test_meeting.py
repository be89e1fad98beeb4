"""Machines that try whether they reach each other, as threads of one process on the loopback."""

import json
import socket
import threading
import time
from collections.abc import Sequence

import pytest

from cuadrilla.errors import CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.host import meeting
from cuadrilla.host.meeting import Meeting, card_of, meet, private_address
from tests.ports import free_port


@pytest.fixture
def port() -> int:
    return free_port()


def at(port: int, *, number: int, machines: int, seconds: float = 20) -> Meeting:
    return Meeting(address="127.0.0.1", port=port, machines=machines, number=number, seconds=seconds)


def gather(port: int, numbers: Sequence[int], *, machines: int, seconds: float = 20) -> list[str]:
    """What each machine finds: its card, or the error's message."""
    found = [""] * len(numbers)

    def machine(index: int, number: int) -> None:
        try:
            found[index] = meet(at(port, number=number, machines=machines, seconds=seconds))
        except CuadrillaError as error:
            found[index] = f"{error.message} / {error.hint}"

    threads = [threading.Thread(target=machine, args=pair) for pair in enumerate(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_that_reach_each_other_name_their_card(port: int) -> None:
    assert gather(port, [0, 1, 2], machines=3) == ["lo"] * 3


def test_a_machine_that_does_not_come_is_named_to_all(port: int) -> None:
    found = gather(port, [0, 2], machines=3, seconds=2)
    assert all("machine 1 did not call within 2 s" in text for text in found), found
    assert all("cuadrilla up RUN --listen 127.0.0.1" in text for text in found)


def test_two_of_one_number_are_refused(port: int) -> None:
    found = gather(port, [0, 1, 1], machines=3, seconds=5)
    assert "two machines say that they are number 1" in found[0]


def test_a_machine_that_comes_back_is_no_second_one(port: int) -> None:
    """It was killed while number 0 waited for the others."""
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.extend(gather(port, [0], machines=3)))
    waiting.start()
    deadline = time.monotonic() + 10
    with (
        meeting._dialled("127.0.0.1", at(port, number=1, machines=3), deadline) as killed,
        socket.create_server(("127.0.0.1", 0)) as own,
    ):
        said = {"number": 1, "address": "127.0.0.1", "port": own.getsockname()[1], "drawn": "x"}
        killed.sendall(json.dumps(said).encode() + b"\n")
        with own.accept()[0] as caller:
            caller.sendall(b'{"drawn": "x"}\n')
    assert gather(port, [1, 2], machines=3) == ["lo"] * 2
    waiting.join()
    assert found == ["lo"]


def test_another_program_at_the_port_of_number_0_is_waited_out(port: int) -> None:
    """As torch's store is, of a training that has just lost a machine."""
    with socket.create_server(("127.0.0.1", port)) as store:
        found: list[str] = []
        early = threading.Thread(target=lambda: found.extend(gather(port, [1], machines=2)))
        early.start()
        for _ in range(2):
            store.accept()[0].close()
    assert gather(port, [0], machines=2) == ["lo"]
    early.join()
    assert found == ["lo"]


def test_what_answers_elsewhere_is_not_taken_for_the_machine(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind NAT, where a machine's own address is another one's out here."""
    real = meeting._read

    def read(connection: socket.socket) -> object:
        said = real(connection)
        return {"drawn": "another"} if said.keys() == {"drawn"} else said

    monkeypatch.setattr(meeting, "_read", read)
    found = gather(port, [0, 1], machines=2)
    assert all("another machine answers there" in text for text in found), found


@pytest.mark.parametrize("said", [b"", b"[]\n", b"\xff\n", b'{"number": true}\n', b'{"number": 7}\n', b"x" * 5000])
def test_a_stranger_who_comes_first_changes_nothing(port: int, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real, strangers = meeting._listener, list[socket.socket]()

    def listener(address: str, number: int) -> socket.socket:
        made = real(address, number)
        if number == port:
            strangers.append(socket.create_connection((address, number)))
            strangers[0].sendall(said)
            strangers[0].shutdown(socket.SHUT_WR)
        return made

    monkeypatch.setattr(meeting, "_listener", listener)
    found = gather(port, [0, 1], machines=2)
    strangers[0].close()
    assert found == ["lo"] * 2


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "0.0.0.0"])
def test_a_public_address_is_refused(address: str) -> None:
    with pytest.raises(EnvironmentProblem, match="public address") as caught:
        private_address(address)
    assert "cuadrilla join" in caught.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1", "192.168.1.50", "10.0.0.1", "100.64.0.7", "fd00::5"])
def test_private_addresses_are_taken(address: str) -> None:
    assert private_address(address) == address


def test_an_address_of_another_machine_cannot_be_number_0(port: int) -> None:
    place = Meeting(address="192.0.2.77", port=port, machines=2, number=0, seconds=1)
    with pytest.raises(EnvironmentProblem, match="no network card"):
        meet(place)
    assert card_of("10.0.0.1", {"lo": ["127.0.0.1"], "eth0": ["fe80::1", "10.0.0.1"]}) == "eth0"


def test_a_taken_port_is_named(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        place = Meeting(address="127.0.0.1", port=port, machines=2, number=0, seconds=1)
        with pytest.raises(LinkError, match=f"cannot listen at 127.0.0.1:{port}"):
            meet(place)


def test_other_systems_are_sent_to_the_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting.platform, "system", lambda: "Darwin")
    with pytest.raises(EnvironmentProblem, match="Darwin") as caught:
        meet(Meeting(address="192.168.1.50", port=12355, machines=2, number=1, seconds=1))
    assert "cuadrilla up RUN --listen 192.168.1.50" in caught.value.hint
