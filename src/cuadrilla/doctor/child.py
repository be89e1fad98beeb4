"""What a file system could hold up and is therefore done in a child: `python -m cuadrilla.doctor.child JOB ...`.

speed FOLDER   all and free bytes there, then bytes per second that are read from a new file
port           on which this machine coordinates a crew, if it does
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.link.address import Address

SPEED_BYTES = 16 * 2**20
BLOCK_BYTES = 1 << 20


def child_argv(job: str, *arguments: str) -> list[str]:
    """-P: a file of the user's folder must not shadow a module."""
    return [sys.executable, "-P", "-m", "cuadrilla.doctor.child", job, *arguments]


def speed(folder: Path) -> float:
    """Read what was written, not what the kernel remembers of it. Raises OSError for a folder that takes no file."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        block = os.urandom(BLOCK_BYTES)
        for _ in range(SPEED_BYTES // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.monotonic()
        while file.read(BLOCK_BYTES):
            pass
        return SPEED_BYTES / max(time.monotonic() - began, 1e-9)


def own_port() -> int | None:
    """As the home folder has it."""
    try:
        return Address.parse(str(Home.of_user().open_crew().get("address"))).port
    except LinkError:
        return None


def main() -> None:
    job, *arguments = sys.argv[1:]
    if job == "port":
        sys.stdout.write(f"{own_port() or ''}\n")
        return
    try:
        usage = shutil.disk_usage(arguments[0])
        sys.stdout.write(f"{usage.total} {usage.free}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{speed(Path(arguments[0])):.0f}\n")
    except OSError as error:
        sys.exit(error.strerror or str(error))


if __name__ == "__main__":
    main()
