"""Strangers at a crew's port stop neither the run, nor new workers, nor the restart of the coordinator."""

import contextlib
import socket
from pathlib import Path

import psutil
import pytest

from cuadrilla.rundir import RunDir
from tests.commands import (
    coordinator,
    events,
    goes_on,
    is_what_one_worker_gives,
    joined,
    make_run,
    newest_version,
    reached,
    start,
    stop,
    wait_for,
)
from tests.machines import Machine, Machines, down, invite, present, up
from tests.strangers import context, idle, siege

IN_CI, LONG = 1_000, 40_000
"""Connections of each of the four strangers: one or two seconds of them, and two minutes."""


def listening_port(process: psutil.Process) -> int:
    [listener] = [one for one in process.net_connections(kind="inet") if one.status == psutil.CONN_LISTEN]
    return int(listener.laddr.port)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("times", [IN_CI, pytest.param(LONG, marks=pytest.mark.soak)])
def test_strangers_at_the_port_of_a_practice_crew_change_nothing(tmp_path: Path, times: int) -> None:
    run = make_run(tmp_path / "run", unhurried=True)
    crew = start(run, "--practice", "0.5,0.25")
    wait_for(joined(run, 2), crew)
    process = coordinator(crew)
    with siege(listening_port(process), times=times):
        wait_for(goes_on(run), crew)
    assert coordinator(crew) == process  # not one that was started again
    wait_for(goes_on(run), crew)
    stop(crew)
    assert is_what_one_worker_gives(run)
    assert not events(run, "evicted")
    assert not events(run, "left")


@pytest.mark.thorough
def test_idle_strangers_lock_out_neither_newcomers_nor_a_worker_nor_a_coordinator_that_comes_back(
    machine: Machines, run: RunDir, port: int
) -> None:
    """500 connections complete TLS and then send nothing. Others keep connecting while the coordinator is away."""
    main, ana, luis = machine("coordinator"), machine("ana"), machine("luis")
    crew = up(main, run, port)
    text = invite(main, "--uses", "2")
    first = ana.start("join", "--name", "ana", says=text)
    wait_for(lambda: "ana" in present(run), first)
    held = idle(port, number=500)
    assert len(held) == 500
    second = luis.start("join", "--name", "luis", says=text)
    wait_for(lambda: "luis" in present(run), second)
    first.kill()
    first.communicate()
    wait_for(lambda: "ana" not in present(run), crew)
    again = ana.start("join")
    wait_for(lambda: "ana" in present(run), again)
    announced = newest_version(run)
    with siege(port, times=IN_CI):
        coordinator(crew).kill()
        wait_for(reached(run, announced + 5), crew, seconds=120)
    for connection in held:
        connection.close()
    assert len(events(run, "coordinator restarted")) == 1
    assert [worker.poll() for worker in (second, again)] == [None, None]
    down(main, crew)
    assert is_what_one_worker_gives(run)


def test_what_strangers_send_reaches_no_terminal(tmp_path: Path, run: RunDir, port: int) -> None:
    """gRPC's own messages contain the server name that a TLS client sends, with all its bytes."""
    main = Machine(tmp_path / "coordinator", prefix=("env", "-u", "GRPC_VERBOSITY"))
    crew = up(main, run, port)
    for _ in range(3):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 5.0) as plain,
            context().wrap_socket(plain, server_hostname="\x1b]0;owned\x07") as tls,
        ):
            tls.recv(1)
    said = down(main, crew)
    assert "\x1b" not in said
    assert "handshake" not in said.lower()
