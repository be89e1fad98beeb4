"""Who is who in a crew: the coordinator by its one self-signed certificate, a node by its token.

    coordinator   server.key  server.pem  nodes.json (names, and the SHA-256 of their tokens: `link/nodes.py`)
    node          token  crew.pem (the certificate of the crew it joined)

Joining: `pinned_certificate` fetches the coordinator's certificate and compares its key with the invite's; the secret
goes over TLS that trusts exactly that certificate; the answer is a random token, which `save_node` keeps.

Invariants
* Nothing secret is sent before the coordinator's key was compared with the invite's.
* The private key never leaves its machine, but for a standby that its owner has named. It and a token are 0600 from
  their first byte on. A file that others can read, or that is missing, empty or does not fit, stops the start.
* A certificate's dates say nothing: clocks of personal machines lie, so it began long ago and never ends.
"""

import hashlib
import os
import re
import secrets
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.link.invite import Invite
from cuadrilla.messages import Message
from cuadrilla.rundir import make_private, typed, write_atomic

SERVER_NAME = "coordinator.cuadrilla"  # what every node expects, wherever the coordinator runs
BEGINS, NEVER = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280, 4.1.2.5
CURVE = ec.SECP256R1()
TOKEN_BYTES = 32
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
COORDINATOR_FILES = ("server.key", "server.pem")
UPDATE = "install the same version of cuadrilla on both machines, then try again"
NO_TLS = "what answers at {address} does not speak TLS 1.3 ({reason})"
HUNG_UP = Message("it closed the connection")
ANOTHER_PROGRAM = Message(
    "check the port: another program may be listening there (on the coordinator: cuadrilla up prints its address)"
)
CERTIFICATE = Message("a certificate (PEM)")


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
    key_file, certificate_file = (folder / name for name in COORDINATOR_FILES)
    if not key_file.exists() and not certificate_file.exists():
        _make_coordinator(folder)
    key = _read(key_file, what=Message("a private key (P-256, PEM)"), parse=_load_key, private=True)
    certificate = _read(certificate_file, what=CERTIFICATE, parse=x509.load_pem_x509_certificate)
    if _spki_hash(_load_key(key).public_key()) != key_hash(certificate):
        apart = "{path} and {certificate} do not belong together"
        raise LinkError(apart, path=key_file, certificate=certificate_file.name, hint=_restore(folder))
    return CoordinatorKeys(key=key, certificate=certificate)


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def token_hash(token: str) -> bytes:
    """All that the coordinator keeps of a token."""
    return hashlib.sha256(token.encode()).digest()


def save_node(folder: Path, *, token: str, certificate: bytes) -> Identity:
    """Keep a token, and the certificate of the coordinator that gave it. Raises LinkError for what is no token."""
    if not TOKEN.fullmatch(token):
        raise LinkError("the coordinator's answer cannot be used: it holds no token", hint=UPDATE)
    make_private(folder)
    write_atomic(folder / "crew.pem", certificate)
    write_atomic(folder / "token", token.encode(), private=True)  # last: with it there, everything is
    return load_node(folder)


def load_node(folder: Path) -> Identity:
    """The identity of a node that has joined. Raises LinkError."""
    certificate = _read(folder / "crew.pem", what=CERTIFICATE, parse=x509.load_pem_x509_certificate)
    token = _read(folder / "token", what=Message("a token"), parse=_load_token, private=True)
    return Identity(certificate=certificate, token=_load_token(token))


def key_hash(certificate: bytes) -> bytes:
    """SHA-256 of the public key (SubjectPublicKeyInfo, DER) of a PEM certificate. Raises LinkError."""
    try:
        return _spki_hash(x509.load_pem_x509_certificate(certificate).public_key())
    except (ValueError, UnsupportedAlgorithm):
        raise LinkError("the other side's answer does not hold a certificate (PEM)", hint=UPDATE) from None


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
    except TimeoutError:
        silent = "what answers at {address} said nothing for {seconds:g} s"
        raise LinkError(silent, address=address, seconds=plain.gettimeout(), hint=ANOTHER_PROGRAM) from None
    except ssl.SSLError as error:
        raise LinkError(NO_TLS, address=address, reason=error.reason or HUNG_UP, hint=ANOTHER_PROGRAM) from None
    except OSError as error:
        hung_up = "what answers at {address} closed the connection ({reason})"
        reason = error.strerror or str(error)
        raise LinkError(hung_up, address=address, reason=reason, hint=ANOTHER_PROGRAM) from None


def _make_coordinator(folder: Path) -> None:
    make_private(folder)
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
    write_atomic(folder / "server.key", raw, private=True)
    write_atomic(folder / "server.pem", certificate.public_bytes(pem))


def _spki_hash(key: PublicKeyTypes) -> bytes:
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).digest()


def _load_key(raw: bytes) -> ec.EllipticCurvePrivateKey:
    """Raises ValueError and others of its kind."""
    key = serialization.load_pem_private_key(raw, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError
    return key


def _load_token(raw: bytes) -> str:
    """Raises ValueError."""
    token = raw.decode().strip()
    if not TOKEN.fullmatch(token):
        raise ValueError
    return token


def _read(path: Path, *, what: str, parse: Callable[[bytes], object], private: bool = False) -> bytes:
    """The content of a file, which `parse` can read. Raises LinkError, also for a secret that others can read."""
    try:
        mode, raw = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
        parse(raw)
    except FileNotFoundError:
        raise LinkError("{path} is missing", path=path, hint=_restore(path.parent)) from None
    except OSError as error:
        unreadable = "{path} cannot be read: {reason}"
        raise LinkError(unreadable, path=path, reason=str(error.strerror), hint=_restore(path.parent)) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        useless = "{path} is empty, or does not hold {what}"
        raise LinkError(useless, path=path, what=what, hint=_restore(path.parent)) from None
    if private and os.name != "nt" and mode & 0o077:
        public = "{path} is open to other users (mode {mode:04o})"
        raise LinkError(public, path=path, mode=mode, hint="chmod 600 {typed}", typed=typed(path))
    return raw


def _restore(folder: Path) -> Message:
    return Message(
        "restore {folder} from a backup, or move it away: new keys are made, and machines join again with an invite",
        folder=folder,
    )
