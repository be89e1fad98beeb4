"""Who is who in a crew: the coordinator by its one self-signed certificate, a node by its token.

    coordinator   coordinator.json (key, certificate)  nodes.json (names, and the SHA-256 of their tokens)
    node          node.json (token, and the certificate of the crew it joined)

Joining: `pinned_certificate` fetches the coordinator's certificate and compares its hash with the invite's; the secret
goes over TLS that trusts exactly that certificate; the answer is a random token, which `save_node` keeps.

Invariants
* Nothing secret is sent before the coordinator's certificate was compared with the invite's.
* The private key never leaves its machine, but for a standby that its owner has named. Both files are 0600 from their
  first byte on. One that others can read, or that is missing, empty or does not fit, stops the start.
* A certificate's dates say nothing: clocks of personal machines lie, so it began long ago and never ends.
"""

import hashlib
import json
import os
import re
import secrets
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.link.base import TOKEN
from cuadrilla.link.invite import Invite
from cuadrilla.messages import Message
from cuadrilla.rundir import make_private, typed, write_json

T = TypeVar("T")
SERVER_NAME = "coordinator.cuadrilla"  # what every node expects, wherever the coordinator runs
BEGINS, NEVER = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280, 4.1.2.5
CURVE = ec.SECP256R1()
TOKEN_BYTES = 32
COORDINATOR_FILE, NODE_FILE = "coordinator.json", "node.json"
ANOTHER_PROGRAM = Message(
    "check the port: another program may be listening there (on the coordinator: cuadrilla up prints its address)"
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A node's token, empty before it has joined, and the certificate (PEM) of the only coordinator that it trusts."""

    certificate: bytes
    token: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class CoordinatorKeys:
    """The coordinator's private key and its certificate, as PEM."""

    key: bytes = field(repr=False)
    certificate: bytes


def open_coordinator(folder: Path) -> CoordinatorKeys:
    """The keys in `folder`, made the first time. Raises LinkError."""

    def parsed(kept: Mapping[str, str]) -> CoordinatorKeys:
        key, certificate = kept["key"].encode(), kept["certificate"].encode()
        own = serialization.load_pem_private_key(key, password=None).public_key()
        if own != x509.load_pem_x509_certificate(certificate).public_key():
            raise ValueError
        return CoordinatorKeys(key=key, certificate=certificate)

    path = folder / COORDINATOR_FILE
    if not path.exists():
        make_private(folder)
        write_json(path, _new_keys(), private=True)
    return _read(path, what=Message("a private key and its certificate (PEM)"), parsed=parsed)


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def token_hash(token: str) -> bytes:
    """All that the coordinator keeps of a token."""
    return hashlib.sha256(token.encode()).digest()


def save_node(folder: Path, *, token: str, certificate: bytes) -> Identity:
    """Keep a token, and the certificate of the coordinator that gave it. Raises LinkError, ResourceError."""
    make_private(folder)
    write_json(folder / NODE_FILE, {"token": token, "certificate": certificate.decode()}, private=True)
    return load_node(folder)


def load_node(folder: Path) -> Identity:
    """The identity of a node that has joined. Raises LinkError."""

    def parsed(kept: Mapping[str, str]) -> Identity:
        certificate = kept["certificate"].encode()
        x509.load_pem_x509_certificate(certificate)
        if not re.fullmatch(TOKEN, kept["token"]):
            raise ValueError
        return Identity(certificate=certificate, token=kept["token"])

    return _read(folder / NODE_FILE, what=Message("a token and a certificate (PEM)"), parsed=parsed)


def key_hash(certificate: bytes) -> bytes:
    """What an invite says of the coordinator: the SHA-256 of its certificate (PEM), which holds its public key."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).digest()


def pinned_certificate(invite: Invite, *, timeout_seconds: float = 5.0) -> bytes:
    """The certificate (PEM) of the coordinator, if its key is the invite's. Sends nothing but a hello.

    Trust exactly this certificate in the connection that carries the secret: that one proves that the other end owns
    the key. Raises LinkError.
    """
    address = invite.address
    try:
        plain = socket.create_connection((address.host, address.port), timeout=timeout_seconds)
    except OSError as error:
        hint = "check the address, that the coordinator runs, and that no firewall is in between"
        reason = error.strerror or str(error)
        raise LinkError("cannot reach {address}: {reason}", address=address, reason=reason, hint=hint) from None
    with plain:
        certificate = ssl.DER_cert_to_PEM_cert(handshake(plain, address)[-1]).encode()
    invite.check_key(key_hash(certificate))
    return certificate


def is_of_coordinator(der: bytes) -> bool:
    """Whether a certificate (DER) is one that coordinators make for themselves, as far as its name says."""
    try:
        return x509.load_der_x509_certificate(der).subject.rfc4514_string() == f"CN={SERVER_NAME}"
    except ValueError:
        return False


def handshake(plain: socket.socket, address: Address) -> tuple[str | None, str | None, bytes]:
    """TLS on a connection: its version, the protocol on it, and the other end's certificate (DER), compared with what
    is known and not verified. Raises LinkError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the key decides, not a CA
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=SERVER_NAME) as secure:
            certificate = secure.getpeercert(binary_form=True)
            assert certificate is not None  # TLS 1.3 has no servers without a certificate
            return secure.version(), secure.selected_alpn_protocol(), certificate
    except OSError as error:
        another = "what answers at {address} is no coordinator, or none that answers in time ({reason})"
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise LinkError(another, address=address, reason=reason, hint=ANOTHER_PROGRAM) from None


def _new_keys() -> dict[str, str]:
    key = ec.generate_private_key(CURVE)
    name = x509.Name.from_rfc4514_string(f"CN={SERVER_NAME}")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGINS)
        .not_valid_after(NEVER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    raw = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    return {"key": raw.decode(), "certificate": certificate.public_bytes(pem).decode()}


def _read(path: Path, *, what: str, parsed: Callable[[Mapping[str, str]], T]) -> T:
    """What `parsed` makes of a private file. Raises LinkError, also for one that others can read."""
    restore = (
        "restore {folder} from a backup, or move it away: new keys are made, and machines join again with an invite"
    )
    hint = Message(restore, folder=path.parent)
    try:
        mode, found = stat.S_IMODE(path.stat().st_mode), parsed(json.loads(path.read_bytes()))
    except OSError as error:
        raise LinkError("{path} cannot be read: {reason}", path=path, reason=str(error.strerror), hint=hint) from None
    except (ValueError, TypeError, KeyError, AttributeError, UnsupportedAlgorithm):
        useless = "{path} is empty, or does not hold {what}"
        raise LinkError(useless, path=path, what=what, hint=hint) from None
    if os.name != "nt" and mode & 0o077:
        public = "{path} is open to other users (mode {mode:04o})"
        raise LinkError(public, path=path, mode=mode, hint="chmod 600 {typed}", typed=typed(path))
    return found
