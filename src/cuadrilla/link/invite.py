"""Invites: one line of text that lets a machine join a crew, and the coordinator's side of it.

    cuadrilla1.HOST:PORT.CODE

    HOST      a name, an IPv4 address, or an IPv6 address in brackets
    CODE      base32 in small letters of: SHA-256 of the certificate (DER) of the coordinator at HOST:PORT; the secret,
              160 random bits, for which it lets a machine in; CRC-32 of HOST:PORT and of all that

Capitals and characters that are not part of an invite (spaces, line breaks, quotes) do no harm.

Invariants
* An invite with a single changed or missing character is refused, unless it still means the same.
* No error message and no `repr` holds a secret. The coordinator keeps only its SHA-256, as the name of a file.
* Wrong secrets are not counted, because nobody can guess 160 bits.
"""

import base64
import hashlib
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.link.base import Refused
from cuadrilla.rundir import make_private, read_object, write_json

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


class Invites:
    """The invites of the crew that this machine coordinates: files of `folder`, each named by its secret's SHA-256.
    `cuadrilla invite` writes them, and the coordinator reads them. Thread-safe.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock, self._lock = folder, clock, threading.Lock()

    def issue(self, *, uses: int) -> bytes:
        """Make an invite for this many machines, and return its secret. Raises ResourceError."""
        make_private(self._folder)
        for path in self._folder.glob("*.json"):
            if self._clock() >= read_object(path).get("expires", 0.0):
                path.unlink(missing_ok=True)
        secret = secrets.token_bytes(SECRET_BYTES)
        write_json(self._file(secret), {"expires": self._clock() + VALID_SECONDS, "uses": uses}, private=True)
        return secret

    def check(self, secret: bytes) -> dict[str, Any]:
        """The invite with this secret. Raises Refused. The error tells only those who know a real secret more."""
        if not (found := read_object(self._file(secret))):
            raise Refused("the secret is not from this crew", hint="ask for a new invite")
        if not found["uses"] or self._clock() >= found["expires"]:
            raise Refused("the invite has been used, or it has expired", hint="ask for a new invite")
        return found

    @contextmanager
    def letting_in(self, secret: bytes) -> Iterator[None]:
        """A context that lets one machine in. If its body fails, the invite stays unused. Raises Refused."""
        with self._lock:
            found = self.check(secret)
            yield
            write_json(self._file(secret), {**found, "uses": found["uses"] - 1}, private=True)

    def _file(self, secret: bytes) -> Path:
        return self._folder / f"{hashlib.sha256(secret).hexdigest()}.json"
