"""`cuadrilla bug-report` on a terminal: it asks before it writes."""

import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from cuadrilla.monitor.bug_report import NAME_OF_FILE
from tests.commands import COMMAND

CEILING_SECONDS = 60.0


def said_until(terminal: int, word: str) -> str:
    """What comes on the terminal until this is in it."""
    said, deadline = "", time.monotonic() + CEILING_SECONDS
    while word not in said:
        assert time.monotonic() < deadline, said[-500:]
        if select.select([terminal], [], [], 0.1)[0]:
            said += os.read(terminal, 2**16).decode(errors="replace")
    return said


@pytest.mark.thorough
@pytest.mark.parametrize(("answer", "written"), [("y", True), ("", False)])
def test_it_asks(answer: str, written: bool, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "LANGUAGE": "en"}
    command = [*COMMAND, "bug-report"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment)
    os.close(theirs)
    try:
        shown = said_until(ours, "[y/N]")
        assert not list(tmp_path.iterdir())
        os.write(ours, f"{answer}\n".encode())
        said_until(ours, "written: " if written else "nothing was written")
        assert process.wait(timeout=CEILING_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "## Machine" in shown
    assert [path.name for path in tmp_path.iterdir()] == ([NAME_OF_FILE] if written else [])
