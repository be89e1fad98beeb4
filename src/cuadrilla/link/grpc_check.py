"""The coordinator's half of `cuadrilla check link`: its clock, its bandwidth both ways, a mean of tensors.

Invariants
* Only listed nodes are answered; the check gives no right and touches nothing of the run.
* Bounded: one measurement of bandwidth at a time; it ends after `LIMIT_SECONDS`, and after `CUT_SECONDS` a caller that
  neither reads nor writes is cut off. Nothing is allocated for a caller beyond a chunk: what it sends is counted and
  thrown away, what it gets is one constant chunk again and again.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import torch
from torch import Tensor

from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.grpc_calls import cut_off, only, reads, refuse, serialize

LIMIT_SECONDS = 25.0
CUT_SECONDS = 30.0
CHUNK_BYTES = 2**17
"""Small enough to end in time on a slow link, large enough to fill a fast one."""
KNOWN_LAYOUT = wire.Layout((("matrix", torch.float32, (128, 256)), ("vector", torch.float32, (1000,))))


def known_tensors(factor: int) -> dict[str, Tensor]:
    """Whole numbers below 2^16 in a fixed disorder, exact in fp32; so is the mean of two of them."""
    return {
        name: ((torch.arange(math.prod(shape), dtype=torch.int64) * factor + 12_345) % 65_521).to(dtype).view(shape)
        for name, dtype, shape in KNOWN_LAYOUT.entries
    }


COORDINATORS_FACTOR, NODES_FACTOR = 40_503, 30_011


class CheckServer:
    """The handlers. `caller(context)` names the node that calls, and ends the call of anybody else."""

    def __init__(self, *, caller: Callable[[Any], str]) -> None:
        self._caller = caller
        self._measuring = threading.Lock()

    def handlers(self) -> dict[str, Any]:
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return {
            "Check": unary(reads(self._check, pb.Nothing), response_serializer=serialize),
            "Receive": stream(reads(self._receive, pb.ReceiveRequest), response_serializer=serialize),
            "Send": unary(reads(self._send, pb.Chunk), response_serializer=serialize),
            "Average": unary(reads(self._average, pb.Chunk), response_serializer=serialize),
        }

    def _check(self, _requests: Iterator[pb.Nothing], context: Any) -> pb.CheckReply:
        self._caller(context)
        return pb.CheckReply(unix_seconds=time.time())

    def _receive(self, requests: Iterator[pb.ReceiveRequest], context: Any) -> Iterator[pb.Chunk]:
        """What a node receives."""
        self._caller(context)
        with self._alone(context) as began:
            request = only(requests, context)
            chunk = wire.chunk_of(os.urandom(CHUNK_BYTES))
            seconds = min(request.seconds, LIMIT_SECONDS)  # False for NaN: nothing is sent
            while time.monotonic() - began < seconds:
                yield chunk

    def _send(self, requests: Iterator[pb.Chunk], context: Any) -> pb.Uploaded:
        """What a node sends."""
        self._caller(context)
        num_bytes = 0
        with self._alone(context) as began:
            try:
                for chunk in requests:
                    num_bytes += len(chunk.data)
                    if time.monotonic() - began > LIMIT_SECONDS:
                        break
            except LinkError as error:
                refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
        return pb.Uploaded(num_bytes=num_bytes)

    def _average(self, requests: Iterator[pb.Chunk], context: Any) -> pb.Chunk:
        self._caller(context)
        cut_off(context, after=CUT_SECONDS)
        request = only(requests, context)
        assembly = wire.Assembly(KNOWN_LAYOUT.num_bytes, layout=KNOWN_LAYOUT)
        try:
            assembly.add(request)
        except LinkError as error:
            refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
        if not assembly.complete:
            refuse(context, "the tensors are not whole", code=grpc.StatusCode.INVALID_ARGUMENT)
        theirs, ours = KNOWN_LAYOUT.unpack(assembly.buffer), known_tensors(COORDINATORS_FACTOR)
        means = {name: (theirs[name] + ours[name]) / 2 for name in ours}
        return next(wire.chunks("mean", KNOWN_LAYOUT.pack(means), layout=KNOWN_LAYOUT))

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
