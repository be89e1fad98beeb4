"""Crews, nodes and requests for the tests of keys, nodes and transports."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cuadrilla.errors import LinkError
from cuadrilla.link.tls import CoordinatorKeys, Identity, node_request, save_node

NOW = datetime.now(UTC)


def join(folder: Path, *, name: str, crew: CoordinatorKeys) -> Identity:
    signed_name, certificate = crew.sign(node_request(folder, name=name))
    assert signed_name == name
    return save_node(folder, certificate=certificate, ca=crew.identity.ca, server=crew.identity.certificate)


def refused(call: Callable[[], object]) -> LinkError:
    with pytest.raises(LinkError) as caught:
        call()
    assert caught.value.exit_code == 5
    assert caught.value.hint
    assert "PRIVATE KEY" not in caught.value.message + caught.value.hint
    return caught.value


def pem_of(key: Any) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_of(identity: Identity) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(identity.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def request_with(key: Any, *names: str) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
