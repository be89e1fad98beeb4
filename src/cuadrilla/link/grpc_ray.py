"""Whether a node gets Ray's token: whether both owners want that, and whether Ray works between the two machines.

Everybody in a Ray cluster can run programs on all its machines, as the user who started Ray there. So two people must
have said yes: the coordinator's owner has named the node (`cuadrilla up --ray-node`), the node's owner consents
(`cuadrilla join --ray`, or the answer to a question). Nobody else gets the token.

Ray needs equal versions and connections both ways, and would find out half a minute after its start that it has not
got them. So a node that has joined over the crew link says what it runs and listens on a port for a moment; the
coordinator calls back the address that it sees. Behind a NAT that is the router's. Consent is asked for last: a person
is asked only what makes a difference.

Ray knows one token for all and cannot take it back: when a node that has it is kicked, the cluster must be replaced.

A head is asked whether it wants a token over Ray's own gRPC: Ray says of a wrong token, of none and of no head alike
that it could not connect. Source: `CheckAlive` of ray/protobuf/gcs_service.proto; docs.ray.io, "Token authentication".
"""

import hashlib
import hmac
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link.grpc_calls import only, reads, serialize
from cuadrilla.link.tls import key_hash, peer_certificate
from cuadrilla.link.wire import MAX_REASON
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
ANSWER_SECONDS = 10.0
CALL_BACK_SECONDS = 3.0
STARTING = "Ray is being started again"


@dataclass(frozen=True, kw_only=True)
class RayOffer:
    """The cluster of a run. Versions as `importlib.metadata` and `platform` tell them."""

    address: str
    token: str = field(repr=False)
    ray: str
    python: str


@dataclass
class RayHeadServer:
    """Tells nodes where Ray's head is. `names`: the nodes that the coordinator's owner has named. Thread-safe."""

    names: frozenset[str] = frozenset()
    _offer: RayOffer | None = None
    _starting: bool = False
    _given: dict[bytes, str] = field(default_factory=dict)
    """Who has the token: the hash of its key, and its name."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def offer(self, offer: RayOffer | None) -> None:
        """A new cluster, whose token nobody has yet; or none."""
        with self._lock:
            self._offer, self._starting, self._given = offer, False, {}

    def withdraw(self) -> None:
        """Another cluster is being started: whoever asks is to ask again."""
        with self._lock:
            self._offer, self._starting = None, True

    def kicked(self, listed: Collection[bytes]) -> list[str]:
        """Who has the token and is not among these keys any more. Such a name counts no longer: it was for a machine
        that has gone, and the next machine under it may be anybody's.
        """
        with self._lock:
            gone = sorted(name for key, name in self._given.items() if key not in listed)
            self.names = self.names.difference(gone)
            return gone

    def handlers(self, caller: Callable[[Any], str], *, host_of: Callable[[str], str]) -> dict[str, Any]:
        """`caller(context)` names the node that calls, and ends the call of anybody else; `host_of(peer)` is the
        address from which it has come.
        """

        def head(requests: Iterator[pb.RayNode], context: Any) -> pb.RayHead:
            name = caller(context)
            certificate = peer_certificate(context.auth_context())
            assert certificate is not None
            node, key = only(requests, context), key_hash(certificate)
            with self._lock:
                offer, named, starting = self._offer, name in self.names, self._starting
            if not named:
                told = "the coordinator's owner has not named {name} for Ray (cuadrilla up --ray-node {name})"
                return pb.RayHead(refusal=Message(told, name=name))
            if offer is None:
                why = STARTING if starting else "Ray does not run on the coordinator"
                return pb.RayHead(refusal=Message(why), later=starting)
            if node.member:
                same = hmac.compare_digest(node.member, token_hash(offer.token))
                return pb.RayHead(refusal="" if same else Message("that cluster has ended"))
            reason = _why_not(node, offer, host=host_of(context.peer()))
            if reason or not node.consents:
                asked = Message("this machine's owner has not said --ray")
                return pb.RayHead(refusal=reason or asked, ask=not reason)
            return self._give(offer, key=key, name=name)

        unary = grpc.stream_unary_rpc_method_handler
        return {"RayHead": unary(reads(head, pb.RayNode), response_serializer=serialize)}

    def _give(self, offer: RayOffer, *, key: bytes, name: str) -> pb.RayHead:
        """The token, if the cluster is still the one: no kick must miss who has it."""
        with self._lock:
            if offer is not self._offer or name not in self.names:
                return pb.RayHead(refusal=Message(STARTING), later=True)
            self._given[key] = name
        return pb.RayHead(address=offer.address, token=offer.token)


def token_hash(token: str) -> bytes:
    """By which a node says whose token it has."""
    return hashlib.sha256(token.encode()).digest()


def _why_not(node: pb.RayNode, offer: RayOffer, *, host: str) -> str:
    """Why Ray would not work between `host` and here, or nothing."""
    if (node.ray, node.python) != (offer.ray, offer.python):
        return Message(
            "Ray {ray} with Python {python} on the coordinator, Ray {own_ray} with Python {own_python} on this machine",
            ray=offer.ray,
            python=offer.python,
            own_ray=node.ray[:40],
            own_python=node.python[:40],
        )
    try:
        socket.create_connection((host, node.port), timeout=CALL_BACK_SECONDS).close()
    except (OSError, OverflowError):
        return Message("the coordinator cannot call back {host}: a NAT or a firewall is between", host=host)
    return ""


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
                "no Ray head answers at {address}: {reason}",
                address=address,
                reason=one_line(error.details() or "", most=MAX_REASON),
                hint="start one there (ray start --head), or leave engine.ray_address empty",
            ) from None
    return True
