"""The coordinator's half of `cuadrilla doctor HOST:PORT`: its clock, and its bandwidth both ways.

It gives no right, and touches nothing of the run. Nothing is allocated for a caller beyond a chunk: what it sends is
counted and thrown away, what it gets is one constant chunk again and again; for `LIMIT_SECONDS` at most.
"""

import os
import time
from collections.abc import Iterator

from cuadrilla.link.base import Clock

LIMIT_SECONDS = 25.0
CHUNK_BYTES = 2**17
"""Small enough to end in time on a slow link, large enough to fill a fast one."""


def take(requests: Iterator[bytes]) -> Clock:
    """What a node sends, to its end or for so long."""
    num_bytes, end = 0, time.monotonic() + LIMIT_SECONDS
    for chunk in requests:
        num_bytes += len(chunk)
        if time.monotonic() > end:
            break
    return Clock(unix_seconds=time.time(), num_bytes=num_bytes)


def give(seconds: float) -> Iterator[bytes]:
    """What the other side receives for so long, from the first chunk on."""
    chunk, end = os.urandom(CHUNK_BYTES), time.monotonic() + min(seconds, LIMIT_SECONDS)
    while time.monotonic() < end:
        yield chunk
