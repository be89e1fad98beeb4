"""Free ports for tests whose processes bind them seconds later.

None that the system would give to a connection meanwhile, and none that another process of pytest gives out: each has
numbers of its own.
"""

import itertools
import os
import socket

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
