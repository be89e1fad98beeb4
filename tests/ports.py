"""Free ports for tests whose processes bind them only seconds later, and whether a process listens at a port.

Until then the system gives such a port to no outgoing connection, and no other process of pytest gives it out, because
each process of pytest has its own range.
"""

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

FIRST, LAST, SHARES = 20_000, 32_000, 8
"""Above the ports of Ray's workers, and below those that Linux and macOS use for outgoing connections."""
SHARE = (LAST - FIRST) // SHARES
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
_turns = itertools.count(os.getpid())


def free_port() -> int:
    """A port of the loopback at which no process listens."""
    for turn in itertools.islice(_turns, SHARE):
        number = FIRST + _worker * SHARE + turn % SHARE
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", number))
            except OSError:
                continue
            return number
    raise AssertionError("no port is free")


def listens(address: str, *, prefix: Sequence[str] = ()) -> bool:
    """Whether HOST:PORT accepts connections. `prefix`: a command prefix that enters another network namespace."""
    host, _, port = address.rpartition(":")
    if prefix:
        code = f"import socket; socket.create_connection(({host!r}, {port})).close()"
        return subprocess.run([*prefix, sys.executable, "-Sc", code], capture_output=True, check=False).returncode == 0
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
