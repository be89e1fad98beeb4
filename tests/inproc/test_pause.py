"""`cuadrilla pause` and `pause --off`: what they change, and where there is nothing to pause."""

import os
from pathlib import Path

from cuadrilla.home import Home, Joined
from cuadrilla.rundir import make_private
from tests.inside import cuadrilla


def test_twice_and_once_too_often(tmp_path: Path) -> None:
    ana = Home(tmp_path / "ana")
    joined = Joined(folder=ana.joined_folder(b"key"), address="127.0.0.1:1", name="ana")
    make_private(joined.folder)
    ana.remember(joined)
    for words, is_paused in ((("pause",), True), (("pause",), True), (("pause", "--off"), False)) * 2:
        done = cuadrilla(*words, env=os.environ | {"CUADRILLA_HOME": str(ana.path)})
        assert (done.returncode, ana.is_paused) == (0, is_paused), done.stderr


def test_without_a_crew_there_is_nothing_to_pause(tmp_path: Path) -> None:
    done = cuadrilla("pause", env=os.environ | {"CUADRILLA_HOME": str(tmp_path)})
    assert (done.returncode, "works for no crew of another" in done.stderr, Home(tmp_path).is_paused) == (
        5,
        True,
        False,
    )
