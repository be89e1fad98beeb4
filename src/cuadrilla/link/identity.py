"""Identities in a crew. The coordinator proves its own by a self-signed certificate, a node by its token.

    coordinator   coordinator.json (key, certificate)  nodes.json (names, and the SHA-256 of their tokens)
    node          node.json (token, and the certificate of the crew it joined)

To join, `pinned_certificate` fetches the coordinator's certificate and compares its hash with the invite's. The secret
is sent over TLS that trusts only that certificate. The answer is a random token, which `save_node` keeps.

Invariants
* No secret is sent before the coordinator's certificate was compared with the invite's.
* The private key leaves its machine only for a standby that the owner has named. Both files are 0600 from their first
  byte on. The program does not start with one that others can read.
* Certificates are valid from long ago and for ever, because clocks of personal machines are often wrong.
"""

import hashlib
import json
import os
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.link.invite import Invite
from cuadrilla.messages import Message
from cuadrilla.rundir import make_private, typed, write_json

SERVER_NAME = "coordinator.cuadrilla"  # the name that every node expects in the certificate, at any address
BEGINS, NEVER = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280, 4.1.2.5
COORDINATOR_FILE, NODE_FILE = "coordinator.json", "node.json"
ANOTHER_PROGRAM = Message(
    "check the port: another program may be listening there (on the coordinator: cuadrilla up prints its address)"
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """`certificate` (PEM): the coordinator's, the only one that is trusted. `key` (PEM): its private key, only on the
    coordinator. `token`: a node's, once it has joined.
    """

    certificate: bytes
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)


def open_coordinator(folder: Path) -> Identity:
    """The identity of the coordinator in `folder`; the first call makes it. Raises LinkError."""
    if not (folder / COORDINATOR_FILE).exists():
        make_private(folder)
        write_json(folder / COORDINATOR_FILE, _new_keys(), private=True)
    key, certificate = _read(folder / COORDINATOR_FILE, "key", "certificate")
    return Identity(key=key.encode(), certificate=certificate.encode())


def save_node(folder: Path, identity: Identity) -> None:
    """Save a node's token, and the certificate of its coordinator. Raises ResourceError."""
    make_private(folder)
    kept = {"token": identity.token, "certificate": identity.certificate.decode()}
    write_json(folder / NODE_FILE, kept, private=True)


def load_node(folder: Path) -> Identity:
    """The identity of a node that has joined. Raises LinkError."""
    token, certificate = _read(folder / NODE_FILE, "token", "certificate")
    return Identity(certificate=certificate.encode(), token=token)


def key_hash(certificate: bytes) -> bytes:
    """The hash in an invite: the SHA-256 of the coordinator's certificate (PEM), which holds its public key."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).digest()


def pinned_certificate(invite: Invite, *, timeout_seconds: float = 5.0) -> bytes:
    """The coordinator's certificate (PEM), if its hash is the invite's.

    The connection that carries the secret must trust only this certificate: only there does the other end prove that
    it owns the key. Raises LinkError.
    """
    certificate = shown_certificate(invite.address, timeout_seconds=timeout_seconds)
    if key_hash(certificate) != invite.key_hash:
        raise LinkError(
            "{address} is not the coordinator that made this invite (it has a different key); nothing secret was sent",
            address=invite.address,
            hint="check that the invite is from this crew; if it is, another machine in this network may be posing as "
            "the coordinator",
        )
    return certificate


def shown_certificate(address: Address, *, timeout_seconds: float) -> bytes:
    """The certificate (PEM) of the server at `address`, not verified. Sends only TLS's hello. Raises LinkError."""
    try:
        found = ssl.get_server_certificate((address.host, address.port), timeout=timeout_seconds)
    except OSError as error:
        raise LinkError(
            "no coordinator answers at {address}: {reason}",
            address=address,
            reason=getattr(error, "reason", None) or error.strerror or error,
            hint="check the address and the port, that the coordinator runs, and that no firewall is in between",
        ) from None
    return found.encode()


def is_of_coordinator(certificate: bytes) -> bool:
    """Whether a certificate (PEM) has the name that every coordinator's certificate has."""
    return SERVER_NAME.encode() in ssl.PEM_cert_to_DER_cert(certificate.decode())


def _new_keys() -> dict[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
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


def _read(path: Path, *names: str) -> list[str]:
    """These values of a private file. Raises LinkError, also if other users can read the file."""
    try:
        is_open, kept = os.name != "nt" and path.stat().st_mode & 0o077, json.loads(path.read_bytes())
        found = [str(kept[name]) for name in names]
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else Message("it is damaged")
        restore = "restore {folder} from a backup, or move it away: machines then join again with an invite"
        template = "{path} cannot be read: {reason}"
        raise LinkError(template, path=path, reason=reason, hint=restore, folder=path.parent) from None
    if is_open:
        raise LinkError("{path} is open to other users", path=path, hint="chmod 600 {typed}", typed=typed(path))
    return found
