"""Other programs, asked with a time limit: what they said, and how they ended.

A driver's program may hang for ever, and Windows' programs answer in UTF-16. Nothing here raises or waits longer.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cuadrilla.host.probe import kill

MAX_OUTPUT_BYTES = 1 << 20
POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class ProgramAnswer:
    """`text`: what it wrote on both streams. `code` None: it did not end in time, or would not stop talking."""

    text: str = ""
    code: int | None = 0

    @property
    def ok(self) -> bool:
        return self.code == 0


def answer_of(argv: Sequence[str], *, seconds: float) -> ProgramAnswer | None:
    """What a program says, in English where it can; None if there is no such program, or it cannot be started."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=os.name == "posix",
            )
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                if os.fstat(output.fileno()).st_size > MAX_OUTPUT_BYTES:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=POLL_SECONDS)
            code = process.poll()
            kill(process)
            output.seek(0)
            return ProgramAnswer(text=decoded(output.read(MAX_OUTPUT_BYTES)), code=code)
    except OSError:
        return None


def decoded(said: bytes) -> str:
    """UTF-8, or what WSL's own programs write: UTF-16 without a mark."""
    text = said.decode("utf-16-le" if b"\0" in said[:8] else "utf-8", errors="replace")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").strip()
