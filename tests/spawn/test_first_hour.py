"""What a newcomer sees at a terminal: how long it will take, that it works, that Ctrl-C is heard, what still holds."""

import os
import re
from contextlib import closing
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import wait_for
from tests.inside import cuadrilla
from tests.terminal import CTRL_C, Terminal

ENDLESS = ("--set", "train.tokens=40_000_000_000")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("measured_soon")
def test_a_first_run_says_how_long_it_takes_hears_ctrl_c_and_goes_on(stories: Path, tmp_path: Path) -> None:
    made = cuadrilla("new", "mio", "--preset", "gpt2-mini", "--data", os.path.relpath(stories, tmp_path), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert re.search(r"gpt2-mini takes about \d+ \w+ here\n.*gpt2-micro takes about", made.stderr)

    words = ("train", "mio", *ENDLESS, "--set", "train.batch_sequences=960")
    with closing(Terminal(words, cwd=tmp_path)) as first:
        wait_for(first.shows(r"device +cpu, \w+ \("), first.process)
        wait_for(first.shows(r"step 0/[\d]+.* \d+% done in \d+ s +ETA"), first.process)
        first.types(CTRL_C)
        wait_for(first.shows("stopping +after this pass"), first.process)
        assert first.process.wait(timeout=150) == 130
        said = "the run was stopped by Ctrl-C at step 0 and saved; the same command continues from there"
        wait_for(first.shows(said))

    with closing(Terminal(words, cwd=tmp_path)) as again:
        wait_for(again.shows(r"\d+ % done"), again.process)
        again.types(CTRL_C)
        assert again.process.wait(timeout=150) == 130
    ends = [row["complete"] for row in read_jsonl(RunDir(tmp_path / "mio").events) if row["event"] == "finished"]
    assert ends == [False, False]


def test_an_invite_is_taken_that_was_pasted_before_it_is_asked_for(tmp_path: Path) -> None:
    with closing(Terminal(["join"], cwd=tmp_path)) as joins:
        joins.types(b"cuadrilla1.not-an-invite\n")
        assert joins.process.wait(timeout=60) == 5
        wait_for(joins.shows("this is not an invite"))
