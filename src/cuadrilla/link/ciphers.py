"""No TLS before 1.3: gRPC for Python cannot be told so, but it takes a list of the ciphers of older versions.

The one cipher that is left on it wants an RSA key, and ours are elliptic (`tls.CURVE`): an older handshake finds no
cipher in common and ends. The ciphers of TLS 1.3 are on no list. gRPC reads the variable once, when it is imported.
Source: gRPC, doc/environment_variables.md; RFC 8446, B.4.
"""

import os
import sys

VARIABLE, RSA_ONLY = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES256-GCM-SHA384"


def allow_only_new_tls() -> None:
    """For this process and its children. To be called before anything imports grpc."""
    assert is_only_new_tls() or "grpc" not in sys.modules
    os.environ[VARIABLE] = RSA_ONLY


def is_only_new_tls() -> bool:
    return os.environ.get(VARIABLE) == RSA_ONLY
