"""`cuadrilla pause` and `pause --off`: whom they know, what they say, and what a coordinator's server makes of them."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.link.base import PAUSED, Hello, Stop
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import open_coordinator
from cuadrilla.link.nodes import AllowList
from cuadrilla.rundir import RunDir
from tests.commands import wait_for
from tests.crews import join
from tests.hostile import LAYOUT, Crew
from tests.inside import cuadrilla

Type = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Of a machine that coordinates a crew with `ana` and `luis`."""
    home = Home(tmp_path / "home")
    keys, nodes = open_coordinator(home.crew), AllowList(home.nodes)
    for name in ("ana", "luis"):
        join(tmp_path / name, name=name, crew=keys, nodes=nodes)
    return home


@pytest.fixture
def types(home: Home) -> Type:
    return lambda *words: cuadrilla(*words, env=os.environ | {"CUADRILLA_HOME": str(home.path)})


HOSTILE = ["", "../../etc/passwd", "ana/cpu", "{name}", "\x1b[2Jana\nluis", "x" * 9999]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_nobody_of_that_name(home: Home, types: Type, name: str) -> None:
    """An empty one, as from a variable that is not set, is no order to this machine."""
    for words in (("pause",), ("pause", "--off")):
        done = types(*words, name)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert "\x1b" not in done.stderr
        assert len(done.stderr) < 600
    assert (home.is_paused, home.paused_nodes) == (False, frozenset())


def test_twice_and_once_too_often(home: Home, types: Type) -> None:
    for _ in range(2):
        assert types("pause", "ana").returncode == 0
        assert types("pause").returncode == 0
    assert (home.is_paused, home.paused_nodes) == (True, {"ana"})
    assert types("pause", "--off", "ana").returncode == 0
    late = types("pause", "--off", "ana")
    assert (late.returncode, "'ana' is not paused" in late.stderr) == (2, True), late.stderr
    assert home.is_paused  # the one does not change the other
    assert types("pause", "--off").returncode == 0
    assert (home.is_paused, home.paused_nodes) == (False, frozenset())


def test_without_a_crew_there_is_nothing_to_pause(tmp_path: Path) -> None:
    done = cuadrilla("pause", env=os.environ | {"CUADRILLA_HOME": str(tmp_path)})
    assert (done.returncode, "works for no crew" in done.stderr, Home(tmp_path).is_paused) == (5, True, False)


def test_a_name_that_was_given_up_waits_no_more(home: Home, types: Type) -> None:
    assert types("pause", "ana").returncode == 0
    assert types("kick", "ana").returncode == 0
    assert home.paused_nodes == frozenset()


def test_who_has_joined_the_run_is_known(home: Home, types: Type, tmp_path: Path) -> None:
    """On a Ray cluster, for example: its name is in the run's events."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    rows = [{"time": 1e9, "event": "joined", "worker": name} for name in ("ray-10-0-0-2/cpu", "here-1")]
    run.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    home.open_file.write_text(json.dumps({"address": "127.0.0.1:1", "run": str(run.path), "pid": os.getpid()}))
    for name in ("ray-10-0-0-2", "here-1"):
        done = types("pause", name)
        assert done.returncode == 0, done.stderr
    assert home.paused_nodes == {"ray-10-0-0-2", "here-1"}


def test_a_session_of_a_paused_node_ends_and_none_begins(crew: Crew) -> None:
    crew.server.pause(frozenset({"ana"}))
    stop = crew.session.next_event()
    assert stop == Stop(reason=PAUSED, again=True)
    assert crew.heard.goodbyes.get(timeout=10) == ("ana", PAUSED)
    assert [report.phase for report in crew.heard.reports["ana"]] == ["paused"]
    again = crew.ana.session(parameters=[LAYOUT])
    assert again.next_event() == stop
    again.close()
    crew.server.pause(frozenset())
    again = crew.ana.session(parameters=[LAYOUT])
    again.call(Hello(speed_hint=1.0))
    assert isinstance(crew.heard.next("ana"), Hello)
    crew.session.close()
    crew.session = again
    assert crew.works()


def test_a_session_that_begins_while_its_node_is_paused_is_none(crew: Crew) -> None:
    """Again and again at the same moment: afterwards nobody of a paused node has a session."""
    luis = Connection(crew.address, identity=crew.node("luis"))
    for number in range(20):
        crew.server.pause(frozenset())
        pausing = threading.Timer(number * 2e-3, crew.server.pause, args=(frozenset({"luis"}),))
        pausing.start()
        session = luis.session(parameters=[LAYOUT])
        with suppress(LinkError):  # the pause was first
            session.call(Hello(speed_hint=1.0))
        pausing.join()
        wait_for(lambda: "luis" not in crew.workers())
        session.close()
    luis.close()
    assert crew.works()
