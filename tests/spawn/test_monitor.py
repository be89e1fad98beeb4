"""`cuadrilla monitor` as a process, at a terminal and into a pipe, on a crew that trains, until it is stopped."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.host.usage import Usage
from cuadrilla.link.base import NodeReport, SaidLine
from cuadrilla.rundir import FolderLock, RunDir
from cuadrilla.train.nodelog import NodeLogs
from tests.commands import begin, wait_for
from tests.terminal import CTRL_C, Terminal
from tests.watched import add_rows

ERASES_LINE, SHOWS_CURSOR = b"\x1b[2K", b"\x1b[?25h"
OWN = b"\x1b[2J\x1b]0;owned\x07"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run that seems to train, since this process holds its lock."""
    run = RunDir(tmp_path / "mio")
    run.path.mkdir()
    add_rows(run.events, [{"time": 1.8e9, "event": "joined", "worker": name} for name in ("pc", "mac")])
    with FolderLock(run.lock):
        yield run


def tell(run: RunDir, step: int, *, text: str = "") -> None:
    """Write a step, and a report of one machine."""
    shares = {"pc": 0.75, "mac": 0.25}
    add_rows(run.metrics, [{"version": step, "loss": 2.0, "tokens_per_second": 400.0, "shares": shares}])
    lines = (SaidLine(level="error", text=text),) if text else ()
    NodeLogs(run.nodes).report("pc", NodeReport(usage=Usage(cpu_percent=50.0), phase="sending", lines=lines))


def test_a_screen_that_is_drawn_again_until_ctrl_c(run: RunDir, tmp_path: Path) -> None:
    tell(run, 1)
    terminal = Terminal(["monitor", str(run.path), "--interval", "0.1"], cwd=tmp_path, LC_ALL="C.UTF-8", LANGUAGE="en")
    try:
        wait_for(terminal.shows(r"mio +running +step 1 .*workers: 2"), terminal.process)
        wait_for(terminal.shows(r"pc +sending +75 %"), terminal.process)
        tell(run, 2, text=f"bad {OWN.decode()} [bold] news")
        wait_for(terminal.shows(r"step 2 "), terminal.process)
        wait_for(terminal.shows(r"!! bad \\u001b\[2J\\u001b\]0;owned\\u0007 \[bold\] news"), terminal.process)
        add_rows(run.events, [{"time": 1.8e9, "event": "left", "worker": "mac", "reason": "no heartbeat"}])
        wait_for(terminal.shows(r"mac +gone .*no heartbeat"), terminal.process)
        terminal.types(CTRL_C)
        assert terminal.process.wait(timeout=60) == 0
        wait_for(lambda: SHOWS_CURSOR in terminal.raw())
    finally:
        terminal.close()
    assert OWN not in terminal.raw()
    last = terminal.raw().rpartition(ERASES_LINE)[2].decode()
    assert re.search(r"step 2 .*workers: 1", last)  # the last one stays
    assert "Traceback" not in last


def test_lines_into_a_pipe(run: RunDir) -> None:
    tell(run, 1)
    with begin("monitor", run.path, "--interval", "0.1", "--json", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["version"] == 1
        tell(run, 2)
        while json.loads(process.stdout.readline())["version"] != 2:
            pass
        process.terminate()
        process.stdout.read()
        assert process.stderr.read() == ""
    assert process.returncode == 0
