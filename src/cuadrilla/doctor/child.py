"""What could hang and is therefore done in a child process: `python -m cuadrilla.doctor.child JOB ...`.

speed FOLDER               bytes per second that are read from a new file there
name                       the addresses that this machine's own name leads to
port                       on which this machine coordinates a crew, if it does
link ADDRESS FOLDER SECS   the steps of `cuadrilla check link`, a JSON object per line; it loads torch
"""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


def own_addresses() -> list[str]:
    """Raises OSError where the name leads nowhere."""
    found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def own_port() -> int | None:
    """As the home folder has it."""
    from cuadrilla.errors import LinkError
    from cuadrilla.home import Home
    from cuadrilla.link.address import Address

    try:
        return Address.parse(str(Home.of_user().open_crew().get("address"))).port
    except LinkError:
        return None


def link_steps(address: str, folder: Path, seconds: float) -> None:
    """Each step as it is done."""
    from cuadrilla.link.address import Address
    from cuadrilla.link.check import Target, check_link
    from cuadrilla.link.ciphers import allow_only_new_tls
    from cuadrilla.log import silence_grpc

    allow_only_new_tls()
    silence_grpc()
    for step in check_link(Target(address=Address.parse(address), folder=folder, seconds=seconds)):
        row = {"step": step.step, "ok": step.ok, "seconds": step.seconds}
        _write({**row, "reason": _taken_apart(step.reason), "hint": _taken_apart(step.hint)})


def _taken_apart(text: str) -> dict[str, Any]:
    """Template and fields, so that the parent can say it in the person's language."""
    fields = {name: _taken_apart(value) if hasattr(value, "template") else value
              for name, value in getattr(text, "fields", {}).items()}  # fmt: skip
    return {"template": getattr(text, "template", text), "fields": fields}


def _write(row: Any) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    job, *arguments = sys.argv[1:]
    try:
        match job:
            case "speed":
                usage = shutil.disk_usage(arguments[0])
                sys.stdout.write(f"{usage.total} {usage.free}\n")
                sys.stdout.flush()
                sys.stdout.write(f"{speed(Path(arguments[0])):.0f}\n")
            case "name":
                sys.stdout.write(" ".join(own_addresses()) + "\n")
            case "port":
                sys.stdout.write(f"{own_port() or ''}\n")
            case "link":
                link_steps(arguments[0], Path(arguments[1]), float(arguments[2]))
    except OSError as error:
        sys.exit(error.strerror or str(error))


if __name__ == "__main__":
    main()
