"""Which ports a crew opens, seen from outside: one at the coordinator, at the chosen address; none elsewhere."""

import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import coordinator, make_run, start, wait_for
from tests.machines import Machines, down, invite, present, up


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", unhurried=True)


def family(*processes: "subprocess.Popen[str]") -> list[psutil.Process]:
    roots = [psutil.Process(process.pid) for process in processes]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


def open_sockets(processes: list[psutil.Process]) -> list[tuple[int, str, int]]:
    """Process, address and port of all sockets that accept connections (TCP) or packets from anywhere (UDP)."""
    return [
        (process.pid, connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and not connection.raddr)
    ]


def test_a_crew_of_machines_opens_one_port(machine: Machines, run: RunDir, port: int) -> None:
    """A coordinator with its own worker process, and a machine that has joined, before and after an invite."""
    home, ana = machine("home"), machine("ana")
    crew = up(home, run, port, workers="[1.0]")
    one_port = {(coordinator(crew).pid, "127.0.0.1", port)}
    assert set(open_sockets(family(crew))) == one_port

    refused = ana.run("join", "--name", "ana", says=invite(home)).stderr
    assert ana.run("join", "--trust", refused.split("cuadrilla join --trust ")[1].split()[0]).returncode == 0
    joined = ana.start("join")
    wait_for(lambda: present(run) == {"here-1", "ana"}, joined)

    assert set(open_sockets(family(crew, joined))) == one_port
    arguments = " ".join(" ".join(process.cmdline()) for process in family(crew, joined))
    assert not [secret for secret in ("PRIVATE", "cuadrilla1.") if secret in arguments]
    assert len(family(crew)) == 3  # parent, coordinator, and the worker process of its own were looked at
    ends = {
        (connection.raddr.ip.removeprefix("::ffff:"), connection.raddr.port)
        for connection in psutil.Process(joined.pid).net_connections(kind="inet")
        if connection.raddr
    }
    assert ends == {("127.0.0.1", port)}  # a worker connects only to its coordinator

    down(home, crew)
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
