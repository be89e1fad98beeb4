"""The steps of `cuadrilla check link` that are calls to the coordinator: see `link/check.py`."""

import os
import time
from collections.abc import Callable, Sequence

import torch

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import Refused
from cuadrilla.link.grpc_check import CHUNK_BYTES, COORDINATORS_FACTOR, KNOWN_LAYOUT, NODES_FACTOR, known_tensors
from cuadrilla.link.grpc_client import Connection
from cuadrilla.link.tls import Identity

NUM_ROUND_TRIPS = 5
BIG_CLOCK_DIFFERENCE_SECONDS = 60.0
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # in the order in which gRPC looks

Step = tuple[str, Callable[[], tuple[str, str]]]
"""Its name; what finds its reason and hint, or raises LinkError."""


class Calls:
    """A connection of this node's, and what is tried over it."""

    def __init__(self, address: str, *, identity: Identity, seconds: float) -> None:
        """`seconds`: how long to measure the bandwidth each way."""
        self._connection = Connection(address, identity=identity)
        self._seconds = seconds

    def steps(self) -> Sequence[Step]:
        return (
            ("credentials", lambda: _credentials(self._connection)),
            ("clock", lambda: _clock(self._connection)),
            ("download", lambda: _download(self._connection, self._seconds)),
            ("upload", lambda: _upload(self._connection, self._seconds)),
            ("average", lambda: _average(self._connection)),
        )

    def close(self) -> None:
        self._connection.close()


def _credentials(connection: Connection) -> tuple[str, str]:
    try:
        description = connection.describe()
    except Refused as error:
        hint = "make an invite there (cuadrilla invite), then here: cuadrilla join --new"
        raise LinkError(error.message, hint=hint) from None
    except LinkError as error:
        proxy = next((name for name in PROXIES if os.environ.get(name)), None)
        if proxy is None:
            raise
        hint = f"gRPC goes through the proxy that {proxy} names: unset it here, or add the coordinator to no_proxy"
        raise LinkError(error.message, hint=hint) from None
    count, num_bytes = len(description.files), sum(file.num_bytes for file in description.files)
    return f"let in; the run needs {count} file{'s' if count != 1 else ''} ({num_bytes / 1e6:.1f} MB)", ""


def _clock(connection: Connection) -> tuple[str, str]:
    """Only for information. The fastest of some calls tells best."""
    trips = []
    for _ in range(NUM_ROUND_TRIPS):
        began, wall = time.monotonic(), time.time()
        theirs = connection.clock()
        took = time.monotonic() - began
        trips.append((took, theirs - (wall + took / 2)))
    took, ahead = min(trips)
    there = f"the coordinator's is {_duration(abs(ahead))} {'ahead' if ahead > 0 else 'behind'}"
    far = abs(ahead) > BIG_CLOCK_DIFFERENCE_SECONDS
    hint = "training does not mind; set the clocks so that logs of the two machines can be compared" if far else ""
    return f"{there if far or abs(ahead) > took else 'the same'}; round trip {_duration(took)}", hint


def _download(connection: Connection, seconds: float) -> tuple[str, str]:
    began = time.monotonic()
    num_bytes = connection.receive_for(seconds)
    return _rate(num_bytes, time.monotonic() - began), ""


def _upload(connection: Connection, seconds: float) -> tuple[str, str]:
    chunk = wire.chunk_of(os.urandom(CHUNK_BYTES))
    began = time.monotonic()
    num_bytes = connection.send_for(seconds, chunk)
    return _rate(num_bytes, time.monotonic() - began), ""


def _average(connection: Connection) -> tuple[str, str]:
    mine, known = known_tensors(NODES_FACTOR), known_tensors(COORDINATORS_FACTOR)
    means = connection.average(mine, layout=KNOWN_LAYOUT)
    wrong = sum(int((means[name].double() * 2 != mine[name].double() + known[name].double()).sum()) for name in mine)
    count = sum(tensor.numel() for tensor in mine.values())
    if wrong:
        raise LinkError(
            f"{wrong} of {count} numbers of the mean are wrong (torch {torch.__version__} here)",
            hint="install the same version of cuadrilla on both machines; test the memory of both (memtest86+)",
        )
    return f"{count:,} numbers, all of them right", ""


def _rate(num_bytes: int, seconds: float) -> str:
    rate = num_bytes / max(seconds, 1e-9)
    return f"{rate / 1e6:.1f} MB/s ({rate * 8 / 1e6:.0f} Mbit/s)"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
