"""The coordinator's half of `cuadrilla doctor HOST:PORT`: its clock, and its bandwidth both ways.

Invariants
* Only listed nodes are answered; the check gives no right and touches nothing of the run.
* Bounded: one measurement of bandwidth at a time; it ends after `LIMIT_SECONDS`, and after `CUT_SECONDS` a caller that
  neither reads nor writes is cut off. Nothing is allocated for a caller beyond a chunk: what it sends is counted and
  thrown away, what it gets is one constant chunk again and again.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from cuadrilla.link.base import Clock, Measure, Received
from cuadrilla.link.calls import first, handler

LIMIT_SECONDS = 25.0
CUT_SECONDS = 30.0
CHUNK_BYTES = 2**17
"""Small enough to end in time on a slow link, large enough to fill a fast one."""


class CheckServer:
    """The handlers. `caller(context)` names the node that calls, and ends the call of anybody else."""

    def __init__(self, *, caller: Callable[[Any], str]) -> None:
        self._caller = caller
        self._measuring = threading.Lock()

    def handlers(self) -> dict[str, Any]:
        return {
            "Check": handler(self._check),
            "Receive": grpc.stream_stream_rpc_method_handler(self._receive),
            "Send": handler(self._send),
        }

    def _check(self, _requests: Iterator[bytes], context: Any) -> Clock:
        self._caller(context)
        return Clock(unix_seconds=time.time())

    def _receive(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """What a node receives."""
        self._caller(context)
        with self._alone(context) as began:
            seconds = min(first(requests, Measure, context).seconds, LIMIT_SECONDS)
            chunk = os.urandom(CHUNK_BYTES)
            while time.monotonic() - began < seconds:
                yield chunk

    def _send(self, requests: Iterator[bytes], context: Any) -> Received:
        """What a node sends."""
        self._caller(context)
        num_bytes = 0
        with self._alone(context) as began:
            for chunk in requests:
                num_bytes += len(chunk)
                if time.monotonic() - began > LIMIT_SECONDS:
                    break
        return Received(num_bytes=num_bytes)

    @contextmanager
    def _alone(self, context: Any) -> Iterator[float]:
        """One measurement at a time, and not for long; when it began, in monotonic seconds."""
        if not self._measuring.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another machine measures its link just now")
        cut = threading.Timer(CUT_SECONDS, context.cancel)
        cut.daemon = True
        cut.start()
        try:
            yield time.monotonic()
        finally:
            cut.cancel()
            self._measuring.release()
