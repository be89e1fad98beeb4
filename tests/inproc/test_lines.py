"""What launchers hear over their lines: known words only, one of each machine, and that somebody is gone."""

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cuadrilla.host.lines import DONE, FAILED, GONE, INTERRUPTED, Lines, Word

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Connections of number 0 to 1 and 2: its end, theirs."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        found = []
        for _ in range(2):
            theirs = stack.enter_context(socket.create_connection(listener.getsockname()))
            found.append((stack.enter_context(listener.accept()[0]), theirs))
        yield found


def heard(lines: Lines, *, number: int = 1, left: int | None = None) -> list[Word]:
    """So many words, or all that are said until so many connections are left."""
    found: list[Word] = []
    deadline = time.monotonic() + 5
    while (len(found) < number if left is None else len(lines.connections) > left) and time.monotonic() < deadline:
        for connection in select.select(lines.connections, [], [], 0.2)[0]:
            found += lines.hear(connection)
    return found


def test_number_0_hands_on_what_one_says_to_the_others(pairs: list[Pair]) -> None:
    zero = Lines({1: pairs[0][0], 2: pairs[1][0]}, number=0)
    one, two = Lines({0: pairs[0][1]}, number=1), Lines({0: pairs[1][1]}, number=2)
    word = Word(machine=1, how=FAILED, rank=3, exit_code=7)
    one.announce(FAILED, rank=3, exit_code=7)
    assert heard(zero) == [word]
    assert heard(two) == [word]
    zero.announce(INTERRUPTED)
    for lines in (one, two):
        assert heard(lines) == [Word(machine=0, how=INTERRUPTED)]


def test_who_closes_without_a_word_is_gone_and_who_is_done_is_not(pairs: list[Pair]) -> None:
    zero = Lines({1: pairs[0][0], 2: pairs[1][0]}, number=0)
    one, two = Lines({0: pairs[0][1]}, number=1), Lines({0: pairs[1][1]}, number=2)
    one.announce(DONE)
    one.close()
    assert heard(zero, left=1) == [Word(machine=1, how=DONE)]
    assert len(zero.connections) == 1
    zero.close()
    assert heard(two, left=0) == [Word(machine=1, how=DONE), Word(machine=0, how=GONE)]
    assert two.connections == []


@pytest.mark.parametrize(
    "line",
    [
        b"rubbish",
        b"[]",
        b'{"how": "rm -rf"}',
        b'{"how": ["done"]}',
        b'{"how": "failed"',
        b"\xff\xfe",
        b"{" * 900,
        b"1e999",
    ],
)
def test_what_is_no_word_is_not_heard(line: bytes, pairs: list[Pair]) -> None:
    zero = Lines({1: pairs[0][0]}, number=0)
    pairs[0][1].sendall(line + b"\n" + b'{"how": "done"}\n')
    assert heard(zero) == [Word(machine=1, how=DONE)]


def test_a_machine_speaks_for_itself_only_and_its_numbers_are_bounded(pairs: list[Pair]) -> None:
    zero = Lines({1: pairs[0][0], 2: pairs[1][0]}, number=0)
    said = {"how": FAILED, "machine": 2, "rank": -1, "exit_code": 10**9}
    pairs[0][1].sendall(json.dumps(said).encode() + b"\n")
    assert heard(zero) == [Word(machine=1, how=FAILED, rank=0, exit_code=0)]


def test_a_line_without_an_end_closes_the_line(pairs: list[Pair]) -> None:
    zero = Lines({1: pairs[0][0]}, number=0)
    pairs[0][1].sendall(b"x" * 5000)
    assert heard(zero) == [Word(machine=1, how=GONE)]
    assert zero.connections == []
