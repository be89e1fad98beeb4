"""Which ports a crew opens, seen from outside: one at the coordinator, at the chosen address; none elsewhere."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import COMMAND, coordinator, make_run, start, wait_for
from tests.ports import free_port

STEPS = 100_000
"""Nobody waits for the end: the runs are stopped once their sockets have been looked at."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", steps=STEPS)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Start]:
    """Starts a command on a machine of its own, as far as cuadrilla can tell: another home folder."""
    started: list[subprocess.Popen[str]] = []

    def begin(name: str, *arguments: str, says: str = "") -> "subprocess.Popen[str]":
        environment = {**os.environ, "CUADRILLA_HOME": str(tmp_path / name)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*COMMAND, *arguments], env=environment, text=True, **pipes)  # type: ignore[call-overload]
        started.append(process)
        process.stdin.write(says)
        process.stdin.close()
        process.stdin = None
        return process

    yield begin
    for process in reversed(started):  # workers first: nobody dials a coordinator that is gone
        if process.poll() is None:
            process.terminate()
    for process in started:
        process.communicate(timeout=150)


def family(*processes: "subprocess.Popen[str]") -> list[psutil.Process]:
    roots = [psutil.Process(process.pid) for process in processes]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


def open_sockets(processes: list[psutil.Process]) -> list[tuple[int, str, int]]:
    """Process, address and port of everything that takes connections (TCP) or packets from anybody (UDP)."""
    return [
        (process.pid, connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and not connection.raddr)
    ]


def has_joined(run: RunDir, *workers: str) -> Callable[[], bool]:
    def joined() -> bool:
        rows = read_jsonl(run.events)
        return set(workers) <= {row["worker"] for row in rows if row["event"] == "joined"}

    return joined


def said_to_end(process: "subprocess.Popen[str]") -> tuple[str, str]:
    out, err = process.communicate(timeout=150)
    return out, err


def test_a_crew_of_machines_opens_one_port(machine: Start, run: RunDir, port: int, tmp_path: Path) -> None:
    """Coordinator with a worker process of its own, and a machine that has joined; before and after an invite."""
    crew = machine("home", "up", str(run.path), "--listen", f"127.0.0.1:{port}", "--set", "engine.workers=[1.0]")
    wait_for(Home(tmp_path / "home").open_file.exists, crew)
    one_port = {(pid, "127.0.0.1", port) for pid in (crew.pid, coordinator(crew).pid)}  # one socket, which both hold
    assert set(open_sockets(family(crew))) == one_port

    text = said_to_end(machine("home", "invite"))[0]
    wait_for(lambda: not list(Home(tmp_path / "home").invites.glob("*.json")), crew)  # the coordinator has taken it
    refused = said_to_end(machine("ana", "join", "--name", "ana", says=text))[1]
    trusted = machine("ana", "trust", refused.split("cuadrilla trust ")[1].split()[0])
    said_to_end(trusted)
    assert trusted.returncode == 0
    joined = machine("ana", "join")
    wait_for(has_joined(run, "here-1", "ana"), joined)

    assert set(open_sockets(family(crew, joined))) == one_port
    assert len(family(crew)) == 3  # parent, coordinator, and the worker process of its own were looked at
    ends = {
        (connection.raddr.ip.removeprefix("::ffff:"), connection.raddr.port)
        for connection in psutil.Process(joined.pid).net_connections(kind="inet")
        if connection.raddr
    }
    assert ends == {("127.0.0.1", port)}  # a worker talks to nobody but its coordinator

    down = machine("home", "down")
    said_to_end(down)
    assert down.returncode == 0
    said_to_end(crew)
    assert crew.returncode == 130
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_training_alone_opens_nothing(run: RunDir) -> None:
    process = start(run)
    try:
        wait_for(lambda: any(row["version"] >= 1 for row in read_jsonl(run.metrics)), process)
        assert open_sockets(family(process)) == []
    finally:
        process.terminate()
        process.communicate(timeout=150)
