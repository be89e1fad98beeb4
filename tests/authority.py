"""A certificate authority for a test, and a server's certificate for the names of other hosts."""

import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Vouches for `hosts`; nobody trusts it who is not told to."""

    def __init__(self, *hosts: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test")])
        self._own = self._certificate(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))
        self._server_key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
        self._server = self._certificate(subject, self._server_key, names)

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        return builder.add_extension(extension, critical=True).sign(self._key, hashes.SHA256())

    def write(self, path: Path) -> Path:
        """The authority's own certificate, for those who shall trust it."""
        path.write_bytes(self._own.public_bytes(serialization.Encoding.PEM))
        return path

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        key = self._server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with tempfile.NamedTemporaryFile() as file:
            file.write(self._server.public_bytes(serialization.Encoding.PEM) + key)
            file.flush()
            context.load_cert_chain(file.name)
        return context
