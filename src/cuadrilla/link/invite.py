"""Invites: one line of text that lets a machine join a crew, and the coordinator's side of it. No I/O, no clock.

    cuadrilla1.HOST:PORT.CODE

    HOST      a name, an IPv4 address, or an IPv6 address in brackets
    CODE      base32 in small letters: SHA-256 of the coordinator's certificate (DER), who must answer at HOST:PORT;
              160 random bits, why it lets this machine in; CRC-32 of HOST:PORT and of all that

Capitals, spaces, line breaks and quotes around the text do no harm.

Invariants
* A single changed or missing character is refused, or it is one that does not matter and the invite is the same. (A
  changed character of the code is always caught, CRC-32 sees every burst of up to 32 bits; a missing one is, because
  the code has a fixed length; a missing one in HOST:PORT escapes with probability 2^-32.)
* No error message and no `repr` holds a secret. The coordinator keeps only the SHA-256 of it, in memory.
* Nobody guesses 160 bits: wrong secrets are not counted.
"""

import base64
import hashlib
import hmac
import secrets
import threading
import unicodedata
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.link.base import Refused
from cuadrilla.messages import Message

SECRET_BYTES = 20
VALID_SECONDS = 15 * 60.0

PREFIX = "cuadrilla1."
CODE_CHARS = 90  # 32 + 20 + 4 bytes
PADDING = "=" * 6
AROUND = "\"'`´“”„‘’«»<>.,;"  # what people and chats put around a text
INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf"}  # Unicode: spaces, line ends, controls, zero-width characters


@dataclass(frozen=True, kw_only=True)
class Invite:
    """Where the coordinator is, who it is, and the secret it will ask for. `str` is the text to hand over.

    Raises LinkError for a port that nobody can dial. `str` shows the secret, `repr` does not.
    """

    address: Address
    key_hash: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.key_hash) == hashlib.sha256().digest_size
        assert len(self.secret) == SECRET_BYTES
        self.address.check_dialled()

    def check_key(self, key_hash: bytes) -> None:
        """Raises LinkError unless the one who answers holds the key of the one who made this invite."""
        if not hmac.compare_digest(key_hash, self.key_hash):
            raise LinkError(
                "{address} is not the coordinator that made this invite (it has a different key); "
                "nothing secret was sent",
                address=self.address,
                hint="check that the invite is from this crew; if it is, somebody on this network intercepts "
                "the connection",
            )

    def __str__(self) -> str:
        raw = self.key_hash + self.secret
        raw += zlib.crc32(str(self.address).encode() + raw).to_bytes(4, "big")
        return f"{PREFIX}{self.address}.{base64.b32encode(raw).decode().removesuffix(PADDING).lower()}"

    @classmethod
    def parse(cls, text: str) -> "Invite":
        """Read an invite as people paste it. Raises LinkError: not an invite, cut off, mistyped, another format."""
        visible = "".join(char for char in text if unicodedata.category(char) not in INVISIBLE)
        return _parse(visible.strip(AROUND).lower())


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def _parse(text: str) -> Invite:
    """`text` without anything around or inside it that does not belong to it, in small letters."""
    before, _, code = text.rpartition(".")
    if len(code) != CODE_CHARS:
        raise _broken() if text and PREFIX.startswith(text[: len(PREFIX)]) else _no_invite()
    try:
        raw = base64.b32decode(code.upper() + PADDING)
        address = Address.parse(before.removeprefix(PREFIX))
        invite = Invite(address=address, key_hash=raw[:32], secret=raw[32 : 32 + SECRET_BYTES])
    except (ValueError, LinkError):
        raise _broken() from None
    if str(invite) != f"{before}.{code}":  # another checksum, or another spelling of the same bytes
        raise _broken()
    return invite


def _no_invite() -> LinkError:
    told = "paste the whole line that the coordinator printed; it begins with {prefix}"
    return LinkError("this is not an invite", hint=told, prefix=PREFIX)


def _broken() -> LinkError:
    return LinkError(
        "the invite is mistyped, or it is cut off: its checksum does not match",
        hint="copy the whole line, to its very end, and paste it again",
    )


class Invites:
    """The coordinator's invites. `now` is any clock that never goes back, in seconds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued: dict[bytes, tuple[float, int]] = {}
        """Of an invite, by `hash_secret` of its secret: when it expires, and for how many machines it is still good."""

    def adopt(self, secret_hash: bytes, *, uses: int, now: float) -> None:
        """Open an invite for `uses` machines; `hash_secret` of its secret is all that is known here."""
        self._issued[secret_hash] = now + VALID_SECONDS, uses

    def check(self, secret: bytes, *, now: float) -> None:
        """Raises Refused for a secret that is worth nothing; only one who knows it is told more than that."""
        expires, uses_left = self._issued.get(hash_secret(secret), (0.0, -1))
        if uses_left < 0:
            problem = Message("the secret is not from this crew")
        elif uses_left == 0:
            problem = Message("the invite has been used")
        elif now >= expires:
            problem = Message("the invite has expired")
        else:
            return
        raise Refused(problem, hint="ask for a new invite")

    @contextmanager
    def letting_in(self, secret: bytes, *, now: float) -> Iterator[None]:
        """Around what lets one machine in; an error in there uses nothing up. Raises Refused."""
        with self._lock:
            self.check(secret, now=now)
            yield
            expires, uses_left = self._issued[hash_secret(secret)]
            self._issued[hash_secret(secret)] = expires, uses_left - 1


def hash_secret(secret: bytes) -> bytes:
    """All that the coordinator keeps of a secret. How long it takes to look one up tells nothing of the secret."""
    return hashlib.sha256(secret).digest()
