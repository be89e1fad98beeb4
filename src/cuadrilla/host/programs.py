"""Runs other programs with a time limit, and returns their output and how they ended.

A driver's program may hang for ever. Nothing here waits beyond the limit, and nothing raises. Output goes to a
temporary file and not to a pipe, because a grandchild that keeps a pipe open would block us.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_OUTPUT_BYTES = 1 << 20
NOT_FOUND = 127
"""A shell's exit code for a missing program."""
POLL_SECONDS = 0.05
REAP_SECONDS = 2.0
"""A child stuck inside a driver may not die at once; then it is left to the system."""


@dataclass(frozen=True, kw_only=True)
class ProgramAnswer:
    """`text`: its output on both streams. `code`: its exit code; None if it did not end in time or wrote too much;
    `NOT_FOUND` if there is no such program or it cannot be started."""

    text: str = ""
    code: int | None = 0

    @property
    def ok(self) -> bool:
        return self.code == 0


def run(argv: Sequence[str], *, seconds: float, stdin: bytes = b"") -> ProgramAnswer:
    """Run a program, with its messages in English if it has them. It is killed after `seconds`."""
    try:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as said:
            said.write(stdin)
            said.seek(0)
            process = subprocess.Popen(
                list(argv),
                stdin=said,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
                start_new_session=os.name == "posix",  # so that a kill reaches its children, and Ctrl-C only us
            )
            try:
                _wait(process, output.fileno(), deadline=time.monotonic() + seconds)
            finally:
                code = process.poll()
                _kill(process)
            output.seek(0)
            text = output.read(MAX_OUTPUT_BYTES).decode(errors="replace")
            return ProgramAnswer(text=text.replace("\r\n", "\n").strip(), code=code)
    except OSError:  # no such program, or no room for a temporary file
        return ProgramAnswer(code=NOT_FOUND)


def _wait(process: "subprocess.Popen[bytes]", output: int, *, deadline: float) -> None:
    while time.monotonic() < deadline and os.fstat(output).st_size <= MAX_OUTPUT_BYTES:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_SECONDS)
            return


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its children. Returns soon, even if a driver holds the process."""
    if process.poll() is not None:
        return
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=REAP_SECONDS)


def json_rows(text: str) -> list[Mapping[str, Any]]:
    """The JSON objects among the lines of an output. Lines that drivers and libraries print are skipped."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]
