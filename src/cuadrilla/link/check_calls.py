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
from cuadrilla.messages import Message

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
        hint = Message(
            "gRPC goes through the proxy that {proxy} names: unset it here, or add the coordinator to no_proxy",
            proxy=proxy,
        )
        raise LinkError(error.message, hint=hint) from None
    count, megabytes = len(description.files), sum(file.num_bytes for file in description.files) / 1e6
    told = "admitted; the run needs {count} files ({megabytes:.1f} MB)"
    if count == 1:
        told = "admitted; the run needs {count} file ({megabytes:.1f} MB)"
    return Message(told, count=count, megabytes=megabytes), ""


def _clock(connection: Connection) -> tuple[str, str]:
    """Only for information. The fastest of some calls tells best."""
    trips = []
    for _ in range(NUM_ROUND_TRIPS):
        began, wall = time.monotonic(), time.time()
        theirs = connection.clock()
        took = time.monotonic() - began
        trips.append((took, theirs - (wall + took / 2)))
    took, ahead = min(trips)
    far = abs(ahead) > BIG_CLOCK_DIFFERENCE_SECONDS
    there = Message("the same")
    if far or abs(ahead) > took:
        template = "the coordinator's is {duration} ahead" if ahead > 0 else "the coordinator's is {duration} behind"
        there = Message(template, duration=_duration(abs(ahead)))
    hint = Message("training is not affected; set the clocks so that you can compare the logs of the two machines")
    return Message("{clock}; round trip {duration}", clock=there, duration=_duration(took)), hint if far else ""


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
            "{wrong} of {count} numbers of the mean are wrong (torch {torch} here)",
            wrong=wrong,
            count=count,
            torch=str(torch.__version__),
            hint="install the same version of cuadrilla on both machines; test the memory of both (memtest86+)",
        )
    return Message("{count:,} numbers, all of them right", count=count), ""


def _rate(num_bytes: int, seconds: float) -> str:
    rate = num_bytes / max(seconds, 1e-9)
    return Message("{rate:.1f} MB/s ({bits:.0f} Mbit/s)", rate=rate / 1e6, bits=rate * 8 / 1e6)


def _duration(seconds: float) -> str:
    if seconds < 1:
        return Message("{number:.1f} ms", number=seconds * 1e3)
    if seconds >= 2 * 86400.0:
        return Message("{number:.1f} days", number=seconds / 86400.0)
    if seconds >= 2 * 3600.0:
        return Message("{number:.1f} hours", number=seconds / 3600.0)
    if seconds >= 2 * 60.0:
        return Message("{number:.1f} minutes", number=seconds / 60.0)
    return Message("{number:.1f} s", number=seconds)
