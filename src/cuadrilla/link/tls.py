"""Keys and certificates of a crew: who may talk to the coordinator, and how a node knows that it is the coordinator.

A crew has its own certificate authority (CA, P-256), made on the coordinator's machine. In a folder `crew`:

    coordinator   ca.key  ca.pem  server.key  server.pem  nodes.json
    node          node.key  node.pem  crew.pem (the CA of the crew it joined)

Joining: `pinned_certificate` fetches the coordinator's certificate and compares its key with the invite's;
`node_request` makes the node's key; request and secret go to the coordinator over TLS that trusts exactly that
certificate (`enrol_identity`); `CoordinatorKeys.sign` answers; `save_node` checks the answer and keeps it.

Invariants
* A private key never leaves its machine, but for the coordinator's to a standby that its owner has named. Its file is
  0600 from its first byte on. A key file that others can read, or that is missing, empty or does not belong to its
  certificate, stops the start.
* The allow-list (`link/nodes.py`) decides, by SHA-256 of the public key: a certificate's names and dates give no
  right. (Clocks of personal machines lie, so certificates begin two days early and never end.)
* Nothing secret is sent before the coordinator's key was compared with the invite's.

TLS demands some certificate of every client. Machines that have none yet show the enrol certificate; it opens nothing
but the method that asks for an invite's secret. Its key is published on purpose, derived from a phrase lest anybody
take it for a leak; the certificate is a constant, because servers compare it bit for bit.
"""

import hashlib
import os
import socket
import ssl
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cuadrilla.errors import LinkError
from cuadrilla.link.invite import Invite, check_node_name
from cuadrilla.messages import Message
from cuadrilla.rundir import make_private, typed, write_atomic

SERVER_NAME = "coordinator.cuadrilla"  # what every node expects, wherever the coordinator runs
CA_NAME = "cuadrilla crew"
BACK_DATED = timedelta(hours=48)
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280, 4.1.2.5: no well-defined end
CURVE = ec.SECP256R1()
MAX_FILE_BYTES = 1 << 20
COORDINATOR_FILES = ("ca.key", "ca.pem", "server.key", "server.pem")
UPDATE = "install the same version of cuadrilla on both machines, then try again"
NO_TLS = "what answers at {address} does not speak TLS 1.3 ({reason})"
HUNG_UP = Message("it closed the connection")
ANSWER = Message("the other side's answer")
NOT_SIGNED = "{certificate} was not signed by {authority}"

ENROL_PHRASE = b"cuadrilla enrol 1: published, without privileges"
# Its use excludes signing certificates: gRPC takes a trusted certificate that is no CA for an issuer otherwise.
ENROL_CERTIFICATE = b"""\
-----BEGIN CERTIFICATE-----
MIIBWzCCAQCgAwIBAgIBATAKBggqhkjOPQQDAjAaMRgwFgYDVQQDDA9jdWFkcmls
bGEgZW5yb2wwIBcNMDAwMTAxMDAwMDAwWhgPOTk5OTEyMzEyMzU5NTlaMBoxGDAW
BgNVBAMMD2N1YWRyaWxsYSBlbnJvbDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IA
BBSEfHn612XUO3bGqtlUlptM+awrdEb3L/uM3z86LOI7TwX7UGBUKpPyqRK6yGJL
xU63oQsgTrABAdbJzZyejRGjNTAzMAwGA1UdEwEB/wQCMAAwDgYDVR0PAQH/BAQD
AgeAMBMGA1UdJQQMMAoGCCsGAQUFBwMCMAoGCCqGSM49BAMCA0kAMEYCIQCOi8BE
b7Ro0/XvhysvlM7SosYIAyQS2J53i/nxWdBSDQIhAJ/xZvPkiFPp+zkgxlkrhRyL
3lJ2wXNDblA4yJxm3jSV
-----END CERTIFICATE-----
"""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What one end of a TLS connection shows and trusts, as PEM."""

    key: bytes = field(repr=False)
    certificate: bytes
    ca: bytes


@dataclass(frozen=True, kw_only=True)
class CoordinatorKeys:
    """The coordinator's keys."""

    identity: Identity
    ca_key: ec.EllipticCurvePrivateKey = field(repr=False)

    def client_roots(self) -> bytes:
        """Whose certificates the server accepts: the crew's, and the published one of those who want to enrol."""
        return self.identity.ca + ENROL_CERTIFICATE

    def sign(self, request: bytes, *, name: str = "") -> tuple[str, bytes]:
        """Name and certificate for a node's request. Gives no right: that is `AllowList.add`. Raises LinkError.

        `name`: instead of the request's.
        """
        wanted, key = _read_request(request)
        name = name or wanted
        ca = x509.load_pem_x509_certificate(self.identity.ca)
        # It begins with the CA: the clock of the day it is made says nothing.
        begins, usage = ca.not_valid_before_utc, ExtendedKeyUsageOID.CLIENT_AUTH
        return name, _pem(_certify(name, key, ca=ca, ca_key=self.ca_key, begins=begins, usage=usage))


def open_coordinator(folder: Path, *, now: datetime) -> CoordinatorKeys:
    """The keys in `folder`, made the first time. `now` only dates new certificates. Raises LinkError."""
    ca_key_file, ca_file, server_key_file, server_file = files = [folder / name for name in COORDINATOR_FILES]
    if not any(file.exists() for file in files):
        _make_coordinator(folder, now=now)
    ca_key, ca = _read_pair(ca_key_file, certificate_file=ca_file)
    server_key, server = _read_pair(server_key_file, certificate_file=server_file)
    if not _issued_by(server, ca):
        raise LinkError(NOT_SIGNED, certificate=server_file, authority=ca_file, hint=_restore(folder))
    return CoordinatorKeys(ca_key=ca_key, identity=_identity(server_key, certificate=server, ca=ca))


def node_request(folder: Path, *, name: str) -> bytes:
    """A request (PEM) for a certificate for `name`; makes the node's key the first time. Raises LinkError."""
    check_node_name(name)
    path = folder / "node.key"
    if not path.exists():
        make_private(folder)
        write_atomic(path, _key_pem(ec.generate_private_key(CURVE)), private=True)
    key = _read_key(path)
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name.from_rfc4514_string(f"CN={name}"))
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM)


def save_node(folder: Path, *, certificate: bytes, ca: bytes, server: bytes) -> Identity:
    """Keep the coordinator's answer, once it fits this node's key and the pinned certificate `server`.

    Raises LinkError, and then writes nothing.
    """
    key = _read_key(folder / "node.key")
    own, authority, pinned = (_parse_certificate(pem) for pem in (certificate, ca, server))
    ours = _spki_hash(own.public_key()) == _spki_hash(key.public_key())
    if not ours or not _issued_by(own, authority) or not _issued_by(pinned, authority):
        mixed = "the coordinator's answer cannot be used: its certificates are not from the same crew"
        foreign = "the coordinator's answer cannot be used: its certificate is for another machine's key"
        raise LinkError(mixed if ours else foreign, hint="join again with a new invite")
    write_atomic(folder / "crew.pem", _pem(authority))
    write_atomic(folder / "node.pem", _pem(own))  # last: with it there, everything is
    return load_node(folder)


def load_node(folder: Path) -> Identity:
    """The identity of a node that has joined. Raises LinkError."""
    own_file, ca_file = folder / "node.pem", folder / "crew.pem"
    key, own = _read_pair(folder / "node.key", certificate_file=own_file)
    ca = _read_certificate(ca_file)
    if not _issued_by(own, ca):
        raise LinkError(NOT_SIGNED, certificate=own_file, authority=ca_file, hint=_restore(folder))
    return _identity(key, certificate=own, ca=ca)


def enrol_identity(server: bytes) -> Identity:
    """What a machine without a certificate shows; it trusts exactly `server`, the certificate that was pinned."""
    secret = int.from_bytes(hashlib.sha256(ENROL_PHRASE).digest(), "big")
    return Identity(key=_key_pem(ec.derive_private_key(secret, CURVE)), certificate=ENROL_CERTIFICATE, ca=server)


def is_enrol(certificate: bytes) -> bool:
    """Whether this PEM certificate holds the published enrol key."""
    return key_hash(certificate) == key_hash(ENROL_CERTIFICATE)


def key_hash(certificate: bytes) -> bytes:
    """SHA-256 of the public key (SubjectPublicKeyInfo, DER) of a PEM certificate. Raises LinkError."""
    return _spki_hash(_parse_certificate(certificate).public_key())


def peer_certificate(auth_context: Mapping[str, Iterable[bytes]]) -> bytes | None:
    """The PEM certificate that a gRPC caller proved to own, from `context.auth_context()`."""
    return next(iter(auth_context.get("x509_pem_cert", ())), None)


def pinned_certificate(invite: Invite, *, timeout_seconds: float = 5.0) -> bytes:
    """The certificate (PEM) of the coordinator, if its key is the invite's. Sends nothing but a hello.

    Trust exactly this certificate in the connection that carries the secret (`enrol_identity`): that one proves that
    the other end owns the key. Raises LinkError.
    """
    certificate = _parse_certificate(ssl.DER_cert_to_PEM_cert(_fetch(invite, timeout_seconds=timeout_seconds)).encode())
    invite.check_key(_spki_hash(certificate.public_key()))
    begins, now = certificate.not_valid_before_utc, datetime.now(UTC)
    if begins > now:  # TLS would refuse it later, and not say why
        raise LinkError(
            "this machine's clock ({now} UTC) is earlier than the creation of the crew ({begins})",
            now=f"{now:%Y-%m-%d %H:%M}",
            begins=f"{begins:%Y-%m-%d %H:%M}",
            hint="set the clocks of this machine and of the coordinator; a difference of two days does no harm",
        )
    return _pem(certificate)


def is_of_coordinator(der: bytes) -> bool:
    """Whether a certificate (DER) is one that coordinators make for themselves, as far as its names say."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        names = (certificate.subject.rfc4514_string(), certificate.issuer.rfc4514_string())
    except ValueError:
        return False
    return names[0] == f"CN={SERVER_NAME}" and names[1].startswith(f"CN={CA_NAME} ")


def _fetch(invite: Invite, *, timeout_seconds: float) -> bytes:
    """The certificate (DER) of whoever answers at the invite's address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the key hash decides, not a CA
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    hint = "check the address, that the coordinator runs, and that no firewall is in between"
    try:
        with (
            socket.create_connection((invite.address.host, invite.address.port), timeout=timeout_seconds) as plain,
            context.wrap_socket(plain, server_hostname=SERVER_NAME) as secure,
        ):
            der = secure.getpeercert(binary_form=True)
    except TimeoutError:
        problem = "{address} did not answer within {seconds:g} s"
        raise LinkError(problem, address=invite.address, seconds=timeout_seconds, hint=hint) from None
    except ssl.SSLError as error:
        raise LinkError(
            NO_TLS,
            address=invite.address,
            reason=error.reason or HUNG_UP,
            hint="check the port: another program may be listening there",
        ) from None
    except socket.gaierror:
        unknown = "no machine named {host} is known"
        raise LinkError(unknown, host=invite.address.host, hint="make an invite with an IP address") from None
    except OSError as error:
        reason = error.strerror or error
        raise LinkError("cannot reach {address}: {reason}", address=invite.address, reason=reason, hint=hint) from None
    assert der is not None  # TLS 1.3 has no servers without a certificate
    return der


def _make_coordinator(folder: Path, *, now: datetime) -> None:
    make_private(folder)
    ca_key, server_key = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    # A name of its own, so that certificates of two crews are never taken for one another's.
    name = f"{CA_NAME} {os.urandom(8).hex()}"
    begins = now - BACK_DATED
    ca = _certify(name, ca_key.public_key(), ca=None, ca_key=ca_key, begins=begins)
    public, usage = server_key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH
    server = _certify(SERVER_NAME, public, ca=ca, ca_key=ca_key, begins=begins, usage=usage)
    write_atomic(folder / "ca.key", _key_pem(ca_key), private=True)
    write_atomic(folder / "ca.pem", _pem(ca))
    write_atomic(folder / "server.key", _key_pem(server_key), private=True)
    write_atomic(folder / "server.pem", _pem(server))


def _certify(
    name: str,
    key: ec.EllipticCurvePublicKey,
    *,
    ca: x509.Certificate | None,
    ca_key: ec.EllipticCurvePrivateKey,
    begins: datetime,
    usage: x509.ObjectIdentifier | None = None,
) -> x509.Certificate:
    """A certificate for one end of a connection, or without `ca` and `usage` that of a new CA."""
    signs = x509.KeyUsage(bool(ca), False, False, False, False, not ca, False, False, False)  # data, or certificates
    subject = x509.Name.from_rfc4514_string(f"CN={name}")
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ca.subject if ca else subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(NEVER)
        .add_extension(x509.BasicConstraints(ca=not ca, path_length=None if ca else 0), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _read_request(request: bytes) -> tuple[str, ec.EllipticCurvePublicKey]:
    """The name and the key in a node's request: from a stranger, so nothing in it is believed."""
    try:
        parsed = x509.load_pem_x509_csr(request[:MAX_FILE_BYTES])
        key, proved = parsed.public_key(), parsed.is_signature_valid
        (name,) = [str(common.value) for common in parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except (ValueError, UnsupportedAlgorithm):
        raise LinkError("the request to join cannot be read", hint=UPDATE) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1) or not proved:
        raise LinkError("the request to join is not signed with a P-256 key", hint=UPDATE)
    check_node_name(name)
    return name, key


def _spki_hash(key: PublicKeyTypes) -> bytes:
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).digest()


def _issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, pkcs8, serialization.NoEncryption())


def _identity(key: ec.EllipticCurvePrivateKey, *, certificate: x509.Certificate, ca: x509.Certificate) -> Identity:
    return Identity(key=_key_pem(key), certificate=_pem(certificate), ca=_pem(ca))


def _parse_certificate(pem: bytes, *, what: str = ANSWER, hint: str = UPDATE) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise LinkError("{what} does not hold a certificate (PEM)", what=what, hint=hint) from None
    return certificate


def _read_file(path: Path, *, private: bool) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read(MAX_FILE_BYTES)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise LinkError("{path} is missing", path=path, hint=_restore(path.parent)) from None
        unreadable = "{path} cannot be read: {reason}"
        raise LinkError(unreadable, path=path, reason=str(error.strerror), hint=_restore(path.parent)) from None
    if private and os.name != "nt" and mode & 0o077:
        problem = "{path} is open to other users (mode {mode:04o})"
        raise LinkError(problem, path=path, mode=mode, hint="chmod 600 {typed}", typed=typed(path))
    if not raw.strip():
        raise LinkError("{path} is empty", path=path, hint=_restore(path.parent))
    return raw


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    raw = _read_file(path, private=True)
    try:
        key = serialization.load_pem_private_key(raw, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise LinkError("{path} does not hold a private key (P-256, PEM)", path=path, hint=_restore(path.parent))
    return key


def _read_certificate(path: Path) -> x509.Certificate:
    return _parse_certificate(_read_file(path, private=False), what=str(path), hint=_restore(path.parent))


def _read_pair(path: Path, *, certificate_file: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key, certificate = _read_key(path), _read_certificate(certificate_file)
    if _spki_hash(key.public_key()) != _spki_hash(certificate.public_key()):
        apart = "{path} and {certificate} do not belong together"
        raise LinkError(apart, path=path, certificate=certificate_file.name, hint=_restore(path.parent))
    return key, certificate


def _restore(folder: Path) -> Message:
    return Message(
        "restore {folder} from a backup, or move it away: new keys are made, and machines join again with an invite",
        folder=folder,
    )
