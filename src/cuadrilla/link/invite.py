"""Invites: one line of text that lets a machine join a crew, and the coordinator's side of it. No I/O.

    cuadrilla1.HOST:PORT.CODE

    HOST      a name, an IPv4 address, or an IPv6 address in brackets
    CODE      base32 in small letters: SHA-256 of the coordinator's certificate (DER), who must answer at HOST:PORT;
              160 random bits, why it lets this machine in; CRC-32 of HOST:PORT and of all that

Capitals, and what is no part of an invite (spaces, line breaks, quotes), do no harm.

Invariants
* A single changed or missing character is refused, or it is one that does not matter and the invite is the same.
* No error message and no `repr` holds a secret. The coordinator keeps only the SHA-256 of it, in memory.
* Nobody guesses 160 bits: wrong secrets are not counted.
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
    """Where the coordinator is, who it is, and the secret it will ask for. `str` is the text to hand over.

    `str` shows the secret, `repr` does not.
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
        """Read an invite as people paste it. Raises LinkError: not an invite, cut off, or mistyped."""
        plain = re.sub(r"[^a-z0-9.:_\[\]-]", "", text.lower()).strip(".")
        address, _, code = plain.removeprefix(PREFIX).rpartition(".")
        with suppress(ValueError, LinkError):
            raw = base64.b32decode(code.upper() + PADDING)
            invite = cls(address=Address.parse(address), key_hash=raw[:32], secret=raw[32 : 32 + SECRET_BYTES])
            if str(invite) == plain:  # not another checksum, nor another spelling of the same bytes
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
        """By `hash_secret` of an invite's secret: when it expires, and for how many machines it is still good."""

    def adopt(self, invites: Mapping[bytes, int]) -> None:
        """Open invites, each for so many machines; `hash_secret` of its secret is all that is known here."""
        for secret_hash, uses in invites.items():
            self._issued[secret_hash] = self._clock() + VALID_SECONDS, uses

    def check(self, secret: bytes) -> None:
        """Raises Refused for a secret that is worth nothing; only one who knows it is told more than that."""
        expires, uses_left = self._issued.get(hash_secret(secret), (math.inf, -1))
        if uses_left < 0:
            raise Refused("the secret is not from this crew", hint="ask for a new invite")
        if uses_left == 0 or self._clock() >= expires:
            raise Refused("the invite has been used, or it has expired", hint="ask for a new invite")

    @contextmanager
    def letting_in(self, secret: bytes) -> Iterator[None]:
        """Around what lets one machine in; an error in there uses nothing up. Raises Refused."""
        with self._lock:
            self.check(secret)
            yield
            expires, uses_left = self._issued[hash_secret(secret)]
            self._issued[hash_secret(secret)] = expires, uses_left - 1


def hash_secret(secret: bytes) -> bytes:
    """All that the coordinator keeps of a secret. How long it takes to look one up tells nothing of the secret."""
    return hashlib.sha256(secret).digest()
