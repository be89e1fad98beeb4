"""The coordinator's half of the files of jobs: what machines that train whole runs send back of them.

Invariants
* A file has the name and the size that its receiver has agreed to, and each chunk the sum that it announces. Who is not
  wanted any more is stopped at the next chunk.
* It is written under a temporary name, and has its own when every byte is on the disk.
* A worker has one upload at a time, its newest: an older one may wait for a connection that is gone.
"""

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from cuadrilla.errors import LinkError, ResourceError
from cuadrilla.link import wire
from cuadrilla.link.base import Received
from cuadrilla.link.calls import cut_off, first, handler, refuse
from cuadrilla.link.jobs import JobReceiver, Keep
from cuadrilla.rundir import make_private, open_private, storage_errors

KEEP_SECONDS = 600.0


class KeepServer:
    """Takes the files of jobs. `receiver` says where they go; None: there are no jobs, and nobody wants any."""

    def __init__(self, receiver: JobReceiver | None) -> None:
        self._receiver = receiver
        self._lock = threading.Lock()
        self._sending: dict[str, Any] = {}

    def handlers(self, caller: Callable[[Any], str]) -> dict[str, Any]:
        """`caller(context)` names the worker that calls, and ends the call of anybody else."""

        def keep(requests: Iterator[bytes], context: Any) -> Received:
            worker, receiver = caller(context), self._receiver
            if receiver is None:
                refuse(context, "nobody wants that file", code=grpc.StatusCode.INVALID_ARGUMENT)
            cut_off(context, after=KEEP_SECONDS)
            file = first(requests, Keep, context)
            with self._lock:
                older, self._sending[worker] = self._sending.get(worker), context
            if older is not None:
                older.cancel()
            try:
                write_arriving(worker, file, requests, receiver)
                return Received(num_bytes=file.num_bytes)
            except (LinkError, ResourceError) as error:
                refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
            finally:
                with self._lock:
                    if self._sending.get(worker) is context:
                        del self._sending[worker]

        return {"Keep": handler(keep)}


def write_arriving(worker: str, said: Keep, chunks: Iterator[bytes], receiver: JobReceiver) -> None:
    """Raises LinkError, ResourceError."""
    target = receiver.place_for(worker, said.name, num_bytes=said.num_bytes)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    arriving = wire.Arriving(said.num_bytes)
    make_private(target.parent)
    try:
        with storage_errors(part), open(part, "wb", opener=open_private) as file:
            for chunk in chunks:
                receiver.goes_on(worker, target)
                file.write(arriving.checked(chunk))
            file.flush()
            os.fsync(file.fileno())
        if not arriving.complete:
            raise LinkError("the upload ends early", hint="the worker begins again")
        receiver.goes_on(worker, target)
        with storage_errors(target):
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
