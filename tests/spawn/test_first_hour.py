"""What a newcomer sees at a terminal: how long it will take, that it works, that Ctrl-C is heard, what still holds."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import COMMAND, wait_for
from tests.inside import cuadrilla

CTRL_C = b"\x03"
OWN_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY)
os.execv(sys.argv[1], sys.argv[1:])
"""
ENDLESS = ("--set", "train.tokens=40_000_000_000")


class Terminal:
    """A command at a terminal of its own; what it has shown there, without colours and movements."""

    def __init__(self, arguments: Sequence[str], *, cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        self._shown = bytearray()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *COMMAND, *arguments],
            cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, text=True,
        )  # fmt: skip
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def shows(self, pattern: str) -> Callable[[], bool]:
        return lambda: re.search(pattern, self.text()) is not None

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self._shown.decode(errors="replace"))

    def types(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while data := os.read(self._ours, 2**16):
                self._shown += data


@pytest.fixture
def at_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(arguments, cwd=tmp_path))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_first_run_says_how_long_it_takes_hears_ctrl_c_and_goes_on(
    at_terminal: Callable[..., Terminal], stories: Path, tmp_path: Path
) -> None:
    made = cuadrilla("new", "mio", "--preset", "gpt2-mini", "--data", str(stories), cwd=tmp_path)
    assert made.returncode == 0, made.stderr

    first = at_terminal("train", "mio", *ENDLESS, "--set", "train.batch_sequences=960")
    wait_for(first.shows(r"device +cpu, \w+ \("), first.process)
    told = r"time +about \d+ days at this speed \(gpt2-micro about \d+ (seconds|minutes|hours|days)"
    wait_for(first.shows(told), first.process)
    wait_for(first.shows(r"step 0/[\d]+.* \d+ % done +ETA"), first.process)
    first.types(CTRL_C)
    wait_for(first.shows("stopping +after this pass"), first.process)
    assert first.process.wait(timeout=150) == 130
    wait_for(first.shows("the run was stopped by Ctrl-C at step 0 and saved; the same command continues from there"))

    again = at_terminal("train", "mio")
    wait_for(again.shows(r"from an earlier start: .*train\.batch_sequences=960.*\(--set changes it\)"), again.process)
    wait_for(again.shows(r"\d+ % done"), again.process)
    again.types(CTRL_C)
    assert again.process.wait(timeout=150) == 130
    assert [row["complete"] for row in read_jsonl(RunDir(tmp_path / "mio").events) if row["event"] == "finished"] == [
        False,
        False,
    ]
    shown = cuadrilla("config", "show", "mio", cwd=tmp_path).stdout
    assert re.search(r"model\.width +320 ", shown)
    assert re.search(r"train\.batch_sequences +960 ", shown)
