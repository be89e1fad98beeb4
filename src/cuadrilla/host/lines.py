"""What the launchers of several machines tell each other while their ranks run: how one machine's have ended.

The connections are those of the meeting (`meeting.py`): each machine has one to number 0, which hands on what it hears.
A machine that vanishes without a word, as with a pulled cable, is missed by the kernel's own questions (keepalive).

Nothing is trusted that comes over them: a line of bounded length, of which numbers and one of four words are used.
"""

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

DONE, FAILED, INTERRUPTED, GONE = "done", "failed", "interrupted", "gone"
SILENT_SECONDS, ASK_SECONDS, QUESTIONS = 10, 5, 4
"""Missed after 30 seconds: asked after the silence, and so often without an answer."""
LONGEST_LINE = 1000
LARGEST = 2**20


@dataclass(frozen=True, kw_only=True)
class Word:
    """How the ranks of a machine have ended. `rank` and `exit_code`: of the first one that failed."""

    machine: int
    how: str
    rank: int = 0
    exit_code: int = 0


class Lines:
    """`connections`: by the number of the machine at the other end; `number`: of this one. Used by one thread."""

    def __init__(self, connections: Mapping[int, socket.socket], *, number: int) -> None:
        self._number = number
        self._machines = {connection: machine for machine, connection in connections.items()}
        self._parts = dict.fromkeys(self._machines, b"")
        self._heard: set[int] = set()
        for connection in self._machines:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, SILENT_SECONDS),
                (socket.TCP_KEEPINTVL, ASK_SECONDS),
                (socket.TCP_KEEPCNT, QUESTIONS),
                (socket.TCP_USER_TIMEOUT, 1000 * (SILENT_SECONDS + ASK_SECONDS * QUESTIONS)),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def connections(self) -> list[socket.socket]:
        """Those that are open, to be waited for."""
        return list(self._machines)

    def announce(self, how: str, *, rank: int = 0, exit_code: int = 0) -> None:
        """To all other machines, directly or through number 0."""
        self._send(Word(machine=self._number, how=how, rank=rank, exit_code=exit_code))

    def hear(self, connection: socket.socket) -> list[Word]:
        """What has come; a connection that ends, and is closed then, says that its machine is gone."""
        try:
            data = connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError:  # it was reset, or nobody answered
            data = b""
        *lines, self._parts[connection] = (self._parts[connection] + data).split(b"\n")
        words = [word for line in lines if (word := self._understood(line, connection))]
        if not data or len(self._parts[connection]) > LONGEST_LINE:
            words.append(Word(machine=self._machines[connection], how=GONE))
            self._forget(connection)
        new = []
        for word in words:
            if word.machine not in self._heard:  # the first word of a machine is its last
                self._heard.add(word.machine)
                new.append(word)
                if self._number == 0:
                    self._send(word)
        return new

    def close(self) -> None:
        for connection in self.connections:
            self._forget(connection)

    def _understood(self, line: bytes, connection: socket.socket) -> Word | None:
        try:
            said = json.loads(line)
        except ValueError:
            return None
        if not isinstance(said, dict) or said.get("how") not in (DONE, FAILED, INTERRUPTED, GONE):
            return None
        machine = self._machines[connection]
        if machine == 0:  # it speaks for others, too
            machine = _number(said, "machine")
        if machine == self._number:
            return None
        return Word(
            machine=machine, how=said["how"], rank=_number(said, "rank"), exit_code=min(_number(said, "exit_code"), 255)
        )

    def _send(self, word: Word) -> None:
        for connection, machine in self._machines.items():
            if machine != word.machine:
                with suppress(OSError):  # it is gone, and will be missed
                    connection.sendall(json.dumps(asdict(word)).encode() + b"\n")

    def _forget(self, connection: socket.socket) -> None:
        del self._machines[connection]
        connection.close()


def _number(said: Mapping[str, Any], key: str) -> int:
    value = said.get(key)
    return value if type(value) is int and 0 <= value < LARGEST else 0
