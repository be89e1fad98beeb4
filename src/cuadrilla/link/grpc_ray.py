"""What a Ray head answers to a call with a token, or with none: asked over Ray's own gRPC, before Ray is started.

Ray itself says of a wrong token, of none and of no head alike that it could not connect.
Source: `CheckAlive` of ray/protobuf/gcs_service.proto; docs.ray.io, "Token authentication".
"""

import grpc

from cuadrilla.errors import LinkError

CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
ANSWER_SECONDS = 10.0


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
                f"no Ray head answers at {address}: {error.details()}",
                hint="start one there (ray start --head), or leave engine.ray_address empty",
            ) from None
    return True
