"""Invites: one line of text that lets a machine join a crew, and the coordinator's side of it. No I/O.

    cuadrilla1.HOST:PORT.CODE

    HOST      a name, an IPv4 address, or an IPv6 address in brackets
    CODE      base32 in small letters of: SHA-256 of the certificate (DER) of the coordinator at HOST:PORT; the secret,
              160 random bits, for which it lets a machine in; CRC-32 of HOST:PORT and of all that

Capitals and characters that are not part of an invite (spaces, line breaks, quotes) do no harm.

Invariants
* An invite with a single changed or missing character is refused, unless it still means the same.
* No error message and no `repr` holds a secret. The coordinator keeps only its SHA-256, in memory.
* Wrong secrets are not counted, because nobody can guess 160 bits.
"""

import base64
import hashlib
import math
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.link.base import Refused

SECRET_BYTES = 20
VALID_SECONDS = 15 * 60.0
PREFIX = "cuadrilla1."
PADDING = "=" * 6


@dataclass(frozen=True, kw_only=True)
class Invite:
    """The coordinator's address, the hash of its certificate, and the secret that it will ask for.

    `str` is the text to hand over and shows the secret, `repr` does not.
    """

    address: Address
    key_hash: bytes
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        raw = self.key_hash + self.secret
        raw += zlib.crc32(str(self.address).encode() + raw).to_bytes(4, "big")
        return f"{PREFIX}{self.address}.{base64.b32encode(raw).decode().removesuffix(PADDING).lower()}"

    @classmethod
    def parse(cls, text: str) -> "Invite":
        """Read an invite as people paste it. Raises LinkError if it is no invite, cut off, or mistyped."""
        plain = re.sub(r"[^a-z0-9.:_\[\]-]", "", text.lower()).strip(".")
        address, _, code = plain.removeprefix(PREFIX).rpartition(".")
        with suppress(ValueError, LinkError):
            raw = base64.b32decode(code.upper() + PADDING)
            invite = cls(address=Address.parse(address), key_hash=raw[:32], secret=raw[32 : 32 + SECRET_BYTES])
            if str(invite) == plain:  # compares the checksum, and refuses another spelling of the same bytes
                return invite
        hint = "copy the whole line that the coordinator printed, from {prefix} to its very end, and paste it again"
        raise LinkError("this is not an invite, or it is cut off or mistyped", hint=hint, prefix=PREFIX)


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


class Invites:
    """The coordinator's invites. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._issued: dict[bytes, tuple[float, int]] = {}
        """By the hash of an invite's secret: when it expires, and how many more machines it lets in."""

    def adopt(self, invites: Mapping[bytes, int]) -> None:
        """Open these invites: by the hash of the secret, for how many machines each is."""
        for secret_hash, uses in invites.items():
            self._issued[secret_hash] = self._clock() + VALID_SECONDS, uses

    def check(self, secret: bytes) -> None:
        """Raises Refused for an invalid secret. The error tells only those who know a real secret more than that."""
        expires, uses_left = self._issued.get(hash_secret(secret), (math.inf, -1))
        if uses_left < 0:
            raise Refused("the secret is not from this crew", hint="ask for a new invite")
        if uses_left == 0 or self._clock() >= expires:
            raise Refused("the invite has been used, or it has expired", hint="ask for a new invite")

    @contextmanager
    def letting_in(self, secret: bytes) -> Iterator[None]:
        """A context that lets one machine in. If its body fails, the invite stays unused. Raises Refused."""
        with self._lock:
            self.check(secret)
            yield
            expires, uses_left = self._issued[hash_secret(secret)]
            self._issued[hash_secret(secret)] = expires, uses_left - 1


def hash_secret(secret: bytes) -> bytes:
    """All that the coordinator keeps of a secret. The time to look up a hash reveals nothing about the secret."""
    return hashlib.sha256(secret).digest()
