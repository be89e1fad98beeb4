"""Ctrl-C before a command has anything to save: its message and its exit code say so."""

import signal
from pathlib import Path

import pytest

from cuadrilla.home import Home
from tests.inside import cuadrilla


def test_a_command_that_has_not_begun_says_that_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Home:
        signal.raise_signal(signal.SIGINT)
        return Home(Path())

    monkeypatch.setattr(Home, "of_user", interrupted)
    done = cuadrilla("invite")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
