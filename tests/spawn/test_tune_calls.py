"""A search over a function by a machine that joins: the same results, whoever is killed, and what it refuses."""

import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cuadrilla.home import Home
from cuadrilla.rundir import RunDir
from tests.commands import wait_for
from tests.inside import cuadrilla
from tests.machines import Machine, invite, present
from tests.spawn.test_tune_function import BOWL, WAITS, best, decided, is_gone, pid_in, rows, write

pytestmark = pytest.mark.spawn


def search(machine: Machine, folder: Path, *more: str) -> "subprocess.Popen[str]":
    process = machine.start("tune", str(folder), "--crew", "--listen", "127.0.0.1:0", *more)
    wait_for(lambda: Home(machine.home).open_file.exists(), process)
    return process


def places(folder: Path, event: str = "ended") -> list[Any]:
    return [row["place"] for row in rows(folder, event)]


def test_a_machine_makes_calls_and_one_that_is_killed_is_made_again(
    coordinator: Machine, ana: Machine, tmp_path: Path
) -> None:
    """A call on each machine is killed, then the machine itself; the trials of both are finished all the same. What it
    has printed comes back."""
    (tmp_path / "here").mkdir()
    code = WAITS % str(tmp_path / "here") + BOWL.replace("    print", "    wait_at(x)\n    print")
    folder, undisturbed = write(tmp_path / "search", code, trials=6), write(tmp_path / "alone", BOWL, trials=6)
    assert cuadrilla("tune", undisturbed).returncode == 0
    process = search(coordinator, folder)
    text = invite(coordinator)
    untrusting = ana.start("join", "--name", "ana", says=text)
    assert untrusting.wait(timeout=60) == 5
    assert ana.talk is not None
    (key,) = {word for word in ana.talk.read_text().split() if len(word) == 64}
    assert ana.run("trust", key).returncode == 0
    joined = ana.start("join")
    wait_for(lambda: "ana" in places(folder, "begun"), process)
    wait_for(lambda: bool(calls(joined)), process)
    (call,) = calls(joined)
    call.kill()
    wait_for(lambda: is_gone(call.pid) and calls(joined), process)
    joined.send_signal(signal.SIGKILL)
    again = ana.start("join")
    wait_for(lambda: bool(calls(again)), process)
    (tmp_path / "here" / "go").touch()
    assert process.wait(timeout=120) == 0, coordinator.talk.read_text() if coordinator.talk else ""
    assert again.wait(timeout=60) == 0
    assert decided(folder) == decided(undisturbed)
    assert best(folder)["values"] == best(undisturbed)["values"]
    assert {"ana", "place-1"} == set(places(folder))
    at = next(row for row in rows(folder) if row["place"] == "ana")
    assert "looking at" in (folder / "tune" / f"t{at['trial']:04d}-r0" / "logs" / "talk.txt").read_text()
    assert not list(Home(ana.home).jobs.glob("*/*/runs/*"))


def test_only_a_machine_that_is_named_does_trials(
    coordinator: Machine, ana: Machine, machine: Callable[[str], Machine], tmp_path: Path
) -> None:
    """While only others are there nothing is tried, and the search waits."""
    folder, luis = write(tmp_path / "search", BOWL, trials=4), machine("luis")
    process = search(coordinator, folder, "--not-here", "--on", "ana", "--device", "cpu")
    text = invite(coordinator, "--uses", "2")
    other = luis.start("join", "--name", "luis", says=text)
    wait_for(lambda: present(RunDir(folder / "tune")) == {"luis"}, process)
    assert ana.start("join", "--name", "ana", says=text).wait(timeout=60) == 5
    assert ana.talk is not None
    (key,) = {word for word in ana.talk.read_text().split() if len(word) == 64}
    assert ana.run("trust", key).returncode == 0
    named = ana.start("join")
    assert process.wait(timeout=120) == 0, coordinator.talk.read_text() if coordinator.talk else ""
    assert [each.wait(timeout=60) for each in (other, named)] == [0, 0]
    assert set(places(folder)) == {"ana"}


def calls(joined: "subprocess.Popen[str]") -> list[psutil.Process]:
    found = []
    for child in psutil.Process(joined.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            found += [child] if "call-function" in child.cmdline() else []
    return found


def test_a_machine_whose_packages_are_others_says_so(coordinator: Machine, tmp_path: Path) -> None:
    (tmp_path / "numpy-0.1.dist-info").mkdir()
    (tmp_path / "numpy-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
    (tmp_path / "numpy-0.1.dist-info" / "top_level.txt").write_text("numpy\n")
    code = "import numpy\n" + WAITS % str(tmp_path) + BOWL.replace("    print", "    wait_at(x)\n    print")
    process = search(coordinator, write(tmp_path / "search", code, trials=3))
    ana = Machine(tmp_path / "ana", prefix=("env", f"PYTHONPATH={tmp_path}"), talk=tmp_path / "ana.txt")
    joined = ana.start("join", "--name", "ana", says=invite(coordinator))
    assert joined.wait(timeout=60) == 5
    said = (tmp_path / "ana.txt").read_text()
    assert "the function needs numpy" in said
    assert "this machine has numpy 0.1" in said
    pid_in(tmp_path / "pid")
    (tmp_path / "go").touch()
    assert process.wait(timeout=60) == 0


def test_what_goes_with_what(tmp_path: Path) -> None:
    folder = write(tmp_path / "bowl", BOWL)
    for more, said in (
        (("--crew", "--scheduler", "tcp://127.0.0.1:8786"), "--scheduler excludes --crew"),
        (("--ray", "127.0.0.1:6379", "--scheduler", "tcp://127.0.0.1:8786"), "--scheduler excludes --ray"),
        (("--listen", "127.0.0.1:0"), "are for --crew"),
        (("--not-here",), "--not-here is for --crew"),
        (("--on", "ana"), "are for --crew and --ray"),
        (("--crew", "--on", " "), "--on needs the name of a machine"),
        (("--crew", "--device", "tpu"), "'tpu' is no kind of device"),
    ):
        done = cuadrilla("tune", folder, *more)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
