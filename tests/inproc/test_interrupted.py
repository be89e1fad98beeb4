"""Ctrl-C before a command has anything to save: its message and its exit code say so."""

import signal
from pathlib import Path

import pytest

from cuadrilla.home import Home
from tests.commands import TASK, make_run
from tests.inside import cuadrilla

INTERRUPTS = """
import signal

class Sine(Sine):
    told = False
    def loss(self, model, batch):
        if len(batch["x"]) > 2 and not self.told:  # not when the loss is checked
            self.told = True
            signal.raise_signal(signal.SIGINT)
        return super().loss(model, batch)
"""


def test_a_command_that_has_not_begun_says_that_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Home:
        signal.raise_signal(signal.SIGINT)
        return Home(Path())

    monkeypatch.setattr(Home, "of_user", interrupted)
    done = cuadrilla("invite")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_run_that_is_interrupted_in_its_first_step_has_no_page_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "uno", steps=5)
    (run.path / "task.py").write_text(TASK + INTERRUPTS)
    (run.path / "report.html").write_text("of an earlier run")
    done = cuadrilla("train", run.path, code=130)
    assert "at step 0 and saved; the same command continues from there" in done.stderr
    assert (run.path / "report.html").read_text() == "of an earlier run"
