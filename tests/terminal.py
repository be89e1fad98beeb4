"""Commands at a pseudo-terminal: the text that a person would see there, and keys to type."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.commands import COMMAND

CTRL_C = b"\x03"
MOVEMENT = r"\x1b\[[0-9;?]*[A-Za-z]"
SPANISH = {"COLUMNS": "80", "LC_ALL": "es_ES.UTF-8"}
OWN_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command in its own session, with stdin as its terminal. SIGHUP ends it, even if `nohup` runs the tests."""


class Terminal:
    """A command at its own terminal, and what it has written there."""

    def __init__(self, arguments: Sequence[str], *, cwd: Path, prefix: Sequence[str] = (), **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        self._shown = bytearray()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", **environ}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", OWN_TERMINAL, *COMMAND, *arguments],
            cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, text=True,
        )  # fmt: skip
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def shows(self, pattern: str) -> Callable[[], bool]:
        return lambda: re.search(pattern, self.text()) is not None

    def text(self) -> str:
        return re.sub(rf"{MOVEMENT}|\r", "", self._shown.decode(errors="replace"))

    def lines(self) -> list[str]:
        """Every line that was written, also those that were overwritten later."""
        return re.split(r"[\r\n]+", re.sub(MOVEMENT, "", self._shown.decode(errors="replace")))

    def raw(self) -> bytes:
        """All bytes, with the control sequences."""
        return bytes(self._shown)

    def types(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # no process has the other end open any more
            while data := os.read(self._ours, 2**16):
                self._shown += data
