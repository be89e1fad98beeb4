"""Ray on a network: by consent of both owners, on known ports, in private folders; a kick ends its cluster."""

import contextlib
import importlib.util
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.lan import Member, lan
from cuadrilla.rundir import RunDir
from tests.commands import COMMAND, goes_on, is_what_one_worker_gives, wait_for
from tests.machines import UNHURRIED, Machine, down, invite, present, up
from tests.networks import need_namespaces

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"'
    ),
]

PORT = 47470
AUTO = ("--set", 'engine.kind="auto"')
SOON = 100
"""Seconds, of which Ray's start takes most."""
REFUSED = (401, 403)
REQUEST = """
import http.client, sys
agent = http.client.HTTPConnection(sys.argv[1], 52365, timeout=20)
agent.request("POST", "/api/job_agent/jobs/", headers={"Authorization": "Bearer " + sys.argv[2]})
print(agent.getresponse().status)
"""
DOCUMENTED = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.fixture
def network() -> Iterator[list[Member]]:
    need_namespaces()
    with lan(4, rate="400mbit") as members:
        yield members


def rays(*roots: "subprocess.Popen[str]") -> dict[psutil.Process, Path]:
    """The processes of Ray below these, and the private folder of their cluster on their machine."""
    found = {}
    for root in roots:
        for process in psutil.Process(root.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if folder := re.search(r"(/[^ =]*)/ray/session", " ".join(process.cmdline())):
                    found[process] = Path(folder[1])
    return found


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Terminal:
    """A command whose standard input is a terminal, with a person at it."""

    def __init__(self, machine: Machine, *arguments: str, talk: Path) -> None:
        self._talk = talk
        self._keyboard, theirs = pty.openpty()
        with open(talk, "w") as heard:
            self.process = subprocess.Popen(
                [*machine.prefix, *COMMAND, *arguments], env=machine.environment(), text=True,
                stdin=theirs, stdout=subprocess.DEVNULL, stderr=heard,
            )  # fmt: skip
        os.close(theirs)
        machine.started.append(self.process)

    def said(self) -> str:
        return self._talk.read_text()

    def types(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def close(self) -> None:
        os.close(self._keyboard)


def test_ray_reaches_only_whom_both_owners_want(machines: list[Machine], run: RunDir, tmp_path: Path) -> None:
    """ana's owner is asked at a terminal; luis was not named; eva was, and her owner has not said anything."""
    coordinator, ana, luis, eva = machines
    crew = up(coordinator, run, PORT, *AUTO, "--ray-node", "ana", "--ray-node", "eva", workers=UNHURRIED)
    text = invite(coordinator, "--uses", "3")
    (tmp_path / "invite").write_text(text)
    terminal = Terminal(ana, "join", "--name", "ana", "--invite-file", str(tmp_path / "invite"), talk=tmp_path / "talk")
    wait_for(lambda: "join the Ray cluster?" in terminal.said(), terminal.process)
    assert "Everybody in this Ray cluster can run programs as you on this machine." in terminal.said()
    assert not rays(terminal.process)
    terminal.types("y\n")
    others = [
        luis.start("join", "--name", "luis", "--ray", says=text),
        eva.start("join", "--name", "eva", says=text),
    ]
    wait_for(lambda: present(run) == {"here-1", "ana", "luis", "eva"}, crew, seconds=SOON)
    assert rays(terminal.process)
    assert not rays(*others)
    wait_for(lambda: "tokens/s" in terminal.said(), crew)  # as one sees it through the crew link

    folders = set(rays(crew).values()) | set(rays(terminal.process).values())
    assert len(folders) == 2
    for folder in folders:
        assert folder != Path("/tmp")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert opened(coordinator) == documented("coordinator") | documented("coordinator with Ray")
    assert opened(ana) == documented("node of Ray")
    assert opened(luis) == opened(eva) == documented("worker") == set()

    said = down(coordinator, crew)
    assert "Everybody in this Ray cluster can run programs as you on this machine." in said
    heard = [other.communicate(timeout=100)[1] for other in others]
    assert terminal.process.wait(timeout=100) == 0
    terminal.close()
    assert "through Ray" in terminal.said()
    assert "has not named luis" in heard[0]
    assert heard[1].count("has not said --ray") == 1
    assert not [folder for folder in folders if folder.exists()]
    assert is_what_one_worker_gives(run)


def test_a_kick_ends_the_cluster_and_begins_another_with_a_new_token(machines: list[Machine], run: RunDir) -> None:
    """Nothing that knows the old token is left anywhere; the others are back through Ray, the worker here, too.

    luis works with two devices: two actors of one node.
    """
    coordinator, ana, luis, _ = machines
    names = ("--ray-node", "ana", "--ray-node", "luis")
    crew = up(coordinator, run, PORT, *AUTO, *names, workers=UNHURRIED)
    text = invite(coordinator, "--uses", "2")
    of_luis = {"luis/cpu", "luis/cpu.2"}
    joined = {
        "ana": ana.start("join", "--name", "ana", "--ray", says=text),
        "luis": luis.start("join", "--name", "luis", "--ray", "--devices", "cpu,cpu", says=text),
    }
    wait_for(lambda: present(run) == {"here-1", "ana", *of_luis}, crew, seconds=SOON)
    wait_for(goes_on(run), crew)
    before = rays(crew, *joined.values())
    tokens = {(folder / "ray.token").read_text() for folder in before.values()}
    assert len(tokens) == 1
    (token,) = tokens
    assert run_a_program(coordinator.address, token=token, come_from=ana) not in REFUSED

    assert coordinator.run("kick", "ana").returncode == 0
    wait_for(lambda: not any(lives(process) for process in before), crew)
    wait_for(lambda: bool(rays(joined["luis"])), crew, seconds=SOON)
    wait_for(lambda: present(run) == {"here-1", *of_luis}, crew, seconds=SOON)
    wait_for(goes_on(run), crew)
    after = {(folder / "ray.token").read_text() for folder in rays(crew, joined["luis"]).values()}
    assert len(after) == 1
    assert tokens.isdisjoint(after)
    for machine in (coordinator, luis):
        assert run_a_program(machine.address, token=token, come_from=ana) in REFUSED
    assert joined["ana"].wait(timeout=100) == 5
    down(coordinator, crew)
    assert joined["luis"].wait(timeout=100) == 0
    assert is_what_one_worker_gives(run)


def run_a_program(host: str, *, token: str, come_from: Machine) -> int:
    """What Ray's agent answers to a request to run a program (here none, which is an error of another kind)."""
    done = subprocess.run(
        [*come_from.prefix, sys.executable, "-c", REQUEST, host, token], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def opened(machine: Machine) -> set[tuple[str, str]]:
    """(process, address) of all that listens there, as `ss -ltnup` shows it."""
    shown = subprocess.run([*machine.prefix, "ss", "-Hltnup"], capture_output=True, text=True, check=True).stdout
    places = {"127.0.0.1": "loopback", "*": "all", machine.address: "named"}
    found = set()
    for line in shown.splitlines():
        *_, local, _peer, users = line.split(maxsplit=6)[:7]
        process = users.split('"')[1].replace("ray::IDLE", "ray::RayWorker")  # it waits to become one
        found.add((process, places[local.rpartition(":")[0]]))
    return found


def documented(place: str) -> set[tuple[str, str]]:
    """The same from the table of ports in the documentation."""
    rows = [line.strip("| \n").split(" | ") for line in DOCUMENTED.read_text(encoding="utf-8").splitlines()]
    return {(row[1].strip("`"), row[2]) for row in rows if row[0] == place}


def test_a_node_of_ray_is_paused_by_either_owner(machines: list[Machine], run: RunDir, tmp_path: Path) -> None:
    """And whoever has typed `join` there sees why; Ray is not started while its own owner does not want it."""
    coordinator, ana, *_ = machines
    ana.talk = tmp_path / "talk"
    crew = up(coordinator, run, PORT, *AUTO, "--ray-node", "ana", workers=UNHURRIED)
    assert ana.run("pause").returncode == 0
    joined = ana.start("join", "--name", "ana", "--ray", "--low-priority", says=invite(coordinator))
    wait_for(lambda: ana.talk is not None and "waiting: paused" in ana.talk.read_text(), joined, seconds=SOON)
    assert not rays(joined)
    assert ana.run("unpause").returncode == 0
    wait_for(lambda: present(run) == {"here-1", "ana"}, crew, seconds=SOON)
    actors = [each for each in psutil.Process(joined.pid).children(recursive=True) if "RayWorker" in each.cmdline()[0]]
    assert actors

    for pauses in (coordinator, ana):
        name = ("ana",) if pauses is coordinator else ()
        assert pauses.run("pause", *name).returncode == 0
        wait_for(lambda: present(run) == {"here-1"}, crew)
        wait_for(goes_on(run), crew)
        assert pauses.run("unpause", *name).returncode == 0
        wait_for(lambda: present(run) == {"here-1", "ana"}, crew)
    assert coordinator.run("pause", "here-1").returncode == 0  # a worker of the coordinator's own machine
    wait_for(lambda: present(run) == {"ana"}, crew)
    assert coordinator.run("unpause", "here-1").returncode == 0
    wait_for(lambda: present(run) == {"here-1", "ana"}, crew)
    assert all(lives(actor) for actor in actors)  # it kept what it had loaded
    wait_for(lambda: ana.talk is not None and ana.talk.read_text().count("working again") == 2, joined)
    down(coordinator, crew)
    assert joined.wait(timeout=100) == 0
    said = ana.talk.read_text()
    assert said.count("the coordinator has paused this machine") == 1
    assert said.count("waiting: paused: cuadrilla unpause") == 2
    assert is_what_one_worker_gives(run)
