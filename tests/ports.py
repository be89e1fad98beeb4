"""Free ports for tests whose processes bind them seconds later, and whether somebody listens at one.

Free: none that the system would give to a connection meanwhile, and none that another process of pytest gives out: each
has numbers of its own.
"""

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

FIRST, LAST, SHARES = 20_000, 32_000, 8
"""Above what Ray takes for its workers, below what Linux and macOS take for outgoing connections."""
SHARE = (LAST - FIRST) // SHARES
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
_turns = itertools.count(os.getpid())


def free_port() -> int:
    """Of the loopback; nobody listens there."""
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
    """Whether connections to HOST:PORT are taken; `prefix` leads into another network."""
    host, _, port = address.rpartition(":")
    if prefix:
        code = f"import socket; socket.create_connection(({host!r}, {port})).close()"
        return subprocess.run([*prefix, sys.executable, "-Sc", code], capture_output=True, check=False).returncode == 0
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
