"""Whether Ray works between two machines, found out before Ray is started: it would find out half a minute later.

Ray needs equal versions and connections both ways. So a node that has joined over the crew link says what it runs and
listens on a port for a moment; the coordinator calls back the address that it sees. Behind a NAT that is the router's.
A node that passes gets the cluster's token, over the crew link; Ray knows one token for all and cannot take it back.

A head is asked whether it wants a token over Ray's own gRPC: Ray says of a wrong token, of none and of no head alike
that it could not connect. Source: `CheckAlive` of ray/protobuf/gcs_service.proto; docs.ray.io, "Token authentication".
"""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link.grpc_calls import only, reads, serialize
from cuadrilla.link.wire import MAX_REASON
from cuadrilla.printable import one_line

CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
ANSWER_SECONDS = 10.0
CALL_BACK_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class RayOffer:
    """The cluster of a run. Versions as `importlib.metadata` and `platform` tell them."""

    address: str
    token: str = field(repr=False)
    ray: str
    python: str


class RayHeadDesk:
    """The handler.

    `caller(context)` names the node that calls, and ends the call of anybody else; `host_of(peer)` is the address from
    which it has come.
    """

    def __init__(self, *, caller: Callable[[Any], str], host_of: Callable[[str], str], offer: RayOffer | None) -> None:
        self._caller = caller
        self._host_of = host_of
        self._offer = offer

    def handlers(self) -> dict[str, Any]:
        unary = grpc.stream_unary_rpc_method_handler
        return {"RayHead": unary(reads(self._head, pb.RayNode), response_serializer=serialize)}

    def _head(self, requests: Iterator[pb.RayNode], context: Any) -> pb.RayHead:
        self._caller(context)
        node = only(requests, context)
        offer = self._offer
        if offer is None:
            return pb.RayHead(refusal="the coordinator uses no Ray")
        if (node.ray, node.python) != (offer.ray, offer.python):
            there, here = f"Ray {offer.ray} with Python {offer.python}", f"Ray {node.ray} with Python {node.python}"
            return pb.RayHead(refusal=f"{there} on the coordinator, {here[:100]} on this machine")
        host = self._host_of(context.peer())
        try:
            socket.create_connection((host, node.port), timeout=CALL_BACK_SECONDS).close()
        except (OSError, OverflowError):
            return pb.RayHead(refusal=f"the coordinator cannot call back {host}: a NAT or a firewall is between")
        return pb.RayHead(address=offer.address, token=offer.token)


def admits(address: str, *, token: str) -> bool:
    """Whether the head at HOST:PORT answers to this token (empty: none). Raises LinkError where no head answers."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    options = [("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=ANSWER_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            raise LinkError(
                f"no Ray head answers at {address}: {one_line(error.details() or '', most=MAX_REASON)}",
                hint="start one there (ray start --head), or leave engine.ray_address empty",
            ) from None
    return True
