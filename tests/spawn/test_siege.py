"""A crew under siege: strangers at its port stop neither the run, nor newcomers, nor a coordinator that comes back."""

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cuadrilla.home import Home
from cuadrilla.link.tls import open_coordinator
from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import (
    coordinator,
    events,
    is_what_one_worker_gives,
    joined,
    make_run,
    reached,
    start,
    stop,
    wait_for,
)
from tests.crews import NOW, join
from tests.machines import Machine, down, invite, language_run, present, up
from tests.strangers import context, idle, siege, with_the_enrol_key

STRICT = ("--set", "sync.strict=true")
IN_CI, LONG = 400, 40_000
"""Knocks of each of the four: a second or two, and about a minute."""


def listening_port(process: psutil.Process) -> int:
    [listener] = [one for one in process.net_connections(kind="inet") if one.status == psutil.CONN_LISTEN]
    return int(listener.laddr.port)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("times", [IN_CI, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_strangers_at_the_port_of_a_practice_crew_change_nothing(tmp_path: Path, times: int) -> None:
    run = make_run(tmp_path / "run")
    crew = start(run, *STRICT, "--practice", "0.5,0.25")
    wait_for(joined(run, 2), crew)
    process = coordinator(crew)
    with siege(listening_port(process), times=times):
        wait_for(reached(run, max((row["version"] for row in read_jsonl(run.metrics)), default=0) + 5), crew)
    assert coordinator(crew) == process  # not one that was started again
    wait_for(reached(run, max(row["version"] for row in read_jsonl(run.metrics)) + 5), crew)
    stop(crew)
    assert is_what_one_worker_gives(run, *STRICT)
    assert not events(run, "evicted")
    assert not events(run, "left")


@pytest.fixture
def run(tmp_path: Path, stories: Path) -> RunDir:
    return language_run(tmp_path / "run", stories)


@pytest.mark.thorough
def test_idle_strangers_lock_out_neither_newcomers_nor_a_worker_that_comes_back(
    machine: Callable[[str], Machine], run: RunDir, port: int, tmp_path: Path
) -> None:
    """255 connections with the published key, and 255 with that of a node that was kicked, opened again and again."""
    main, ana, luis = machine("coordinator"), machine("ana"), machine("luis")
    crew = up(main, run, port)
    keys = open_coordinator(Home(main.home).crew, now=NOW)
    kicked = tmp_path / "kicked"
    join(kicked, name="mala", crew=keys)  # a certificate of the crew, and not in its list
    (kicked / "stranger.pem").write_bytes((kicked / "node.pem").read_bytes())
    (kicked / "stranger.key").write_bytes((kicked / "node.key").read_bytes())
    text = invite(main, "--uses", "2")
    first = ana.start("join", "--name", "ana", says=text)
    wait_for(lambda: "ana" in present(run), first)
    held = idle(port, number=255, folder=with_the_enrol_key(tmp_path)) + idle(port, number=255, folder=kicked)
    assert len(held) > 64
    second = luis.start("join", "--name", "luis", says=text)
    wait_for(lambda: "luis" in present(run), second)
    first.kill()
    first.communicate()
    wait_for(lambda: "ana" not in present(run), crew)
    again = ana.start("join")
    wait_for(lambda: "ana" in present(run), again)
    assert [worker.poll() for worker in (second, again)] == [None, None]
    for connection in held:
        connection.close()
    down(main, crew)
    assert is_what_one_worker_gives(run)


@pytest.mark.thorough
def test_a_killed_coordinator_has_its_port_again_whatever_lingers_there(
    machine: Callable[[str], Machine], run: RunDir, port: int, tmp_path: Path
) -> None:
    """200 connections when it dies, and strangers who go on knocking while it is away."""
    main, ana = machine("coordinator"), machine("ana")
    crew = up(main, run, port)
    worker = ana.start("join", "--name", "ana", says=invite(main))
    wait_for(reached(run, 5), crew)
    held = idle(port, number=200, folder=with_the_enrol_key(tmp_path))
    announced = max(row["version"] for row in read_jsonl(run.metrics))
    with siege(port, times=IN_CI):
        killed_at = time.monotonic()
        coordinator(crew).kill()
        wait_for(reached(run, announced + 5), crew, seconds=120)
        print(f"{time.monotonic() - killed_at:.1f} s from the kill to the fifth step behind it")
    for connection in held:
        connection.close()
    assert len(events(run, "coordinator restarted")) == 1
    assert worker.poll() is None
    down(main, crew)
    assert is_what_one_worker_gives(run)


def test_what_strangers_send_reaches_no_terminal(tmp_path: Path, run: RunDir, port: int) -> None:
    """The name that a TLS client asks for is in gRPC's own messages, as it came."""
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
