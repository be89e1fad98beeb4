"""Invites: one line of text that lets a machine join a crew, and the coordinator's side of it. No I/O, no clock.

    cuadrilla1.HOST:PORT.KEYHASH.SECRET.CHECK

    HOST      a name, an IPv4 address, or an IPv6 address in brackets
    KEYHASH   SHA-256 of the coordinator's public key (SubjectPublicKeyInfo, DER): who must answer at HOST:PORT
    SECRET    160 random bits: why the coordinator lets this machine in
    CHECK     CRC-32 of everything before it: a typing error is found here

The codes are Crockford's base32 (https://www.crockford.com/base32.html) in small letters: no i, l, o or u, and a typed
i, l or o is read as the digit it looks like. Capitals, spaces, line breaks and quotes around the text do no harm.

Invariants
* A single changed or missing character is refused, or it is one that does not matter and the invite is the same. (A
  changed character of the codes is always caught, CRC-32 sees every burst of up to 32 bits; a missing one is, because
  codes have fixed lengths; a missing one in HOST:PORT escapes with probability 2^-32.)
* No error message and no `repr` holds a secret. The coordinator keeps only the SHA-256 of it, in memory.
* Nobody guesses 160 bits: wrong secrets are not counted.
"""

import base64
import hashlib
import hmac
import re
import secrets
import unicodedata
import zlib
from dataclasses import dataclass, field
from enum import Enum

from cuadrilla.errors import LinkError
from cuadrilla.link.address import Address
from cuadrilla.messages import Message

FORMAT = 1
SECRET_BYTES = 20
VALID_SECONDS = 15 * 60.0
KEPT_CLOSED = 32  # so many invites that are no longer open are remembered, to say what became of them

PREFIX = f"cuadrilla{FORMAT}."
KEY_CHARS, SECRET_CHARS, CHECK_CHARS = 52, 32, 7
CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
RFC_4648 = "abcdefghijklmnopqrstuvwxyz234567"
TO_CROCKFORD = str.maketrans(RFC_4648, CROCKFORD)
FROM_CROCKFORD = str.maketrans(CROCKFORD, RFC_4648)
LOOKALIKES = str.maketrans("ilo", "110")

CODE = f"[{CROCKFORD}ilo]"
CODES = re.compile(rf"\.{CODE}{{{KEY_CHARS}}}\.{CODE}{{{SECRET_CHARS}}}\.{CODE}{{{CHECK_CHARS}}}\Z")
MAX_NAME = 63
NODE_NAME = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?")
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
        body = f"{PREFIX}{self.address}.{_encode(self.key_hash)}.{_encode(self.secret)}"
        return f"{body}.{_check(body)}"

    @classmethod
    def parse(cls, text: str) -> "Invite":
        """Read an invite as people paste it. Raises LinkError: not an invite, cut off, mistyped, another format."""
        visible = "".join(char for char in text if unicodedata.category(char) not in INVISIBLE)
        return _parse(visible.strip(AROUND).lower())


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def check_node_name(name: str) -> None:
    """Raises LinkError unless `name` can be a node's: names are shown on terminals and used in file names."""
    if not NODE_NAME.fullmatch(name):
        raise LinkError(
            "{name!r} cannot be the name of a node",
            name=name[:80],
            hint="use up to {most} small letters a to z, digits and hyphens inside, such as laptop-ana",
            most=MAX_NAME,
        )


def _encode(raw: bytes) -> str:
    return base64.b32encode(raw).decode().rstrip("=").lower().translate(TO_CROCKFORD)


def _decode(code: str) -> bytes:
    padded = code.translate(FROM_CROCKFORD).upper() + "=" * (-len(code) % 8)
    return base64.b32decode(padded)


def _check(body: str) -> str:
    return _encode(zlib.crc32(body.encode()).to_bytes(4, "big"))


def _parse(text: str) -> Invite:
    """`text` without anything around or inside it that does not belong to it, in small letters."""
    version = re.match(r"cuadrilla([0-9]{1,9})\.", text)
    if version is not None and int(version[1]) != FORMAT:
        raise LinkError(
            "the invite has format {found}; this cuadrilla reads format {known}",
            found=int(version[1]),
            known=FORMAT,
            hint="install the same version of cuadrilla on both machines, then make a new invite",
        )
    codes = CODES.search(text)
    if codes is None:
        raise _not_whole(text)
    body = text[: codes.start()] + codes[0].translate(LOOKALIKES)
    unchecked, _, check = body.rpartition(".")
    if not body.startswith(PREFIX) or not hmac.compare_digest(_check(unchecked), check):
        raise _mistyped()
    _, key_hash, secret = unchecked.rsplit(".", 2)
    try:
        address = Address.parse(text[len(PREFIX) : codes.start()])
        invite = Invite(address=address, key_hash=_decode(key_hash), secret=_decode(secret))
    except LinkError:  # the checksum fits an address that nobody has printed
        raise _mistyped() from None
    if str(invite) != body:  # another spelling of the same bytes: nobody printed that
        raise _mistyped()
    return invite


def _not_whole(text: str) -> LinkError:
    """Why a text that does not end in three codes of the right lengths is no invite."""
    if not text or not (text.startswith(PREFIX) or PREFIX.startswith(text)):
        return LinkError(
            "this is not an invite",
            hint="paste the whole line that the coordinator printed; it begins with {prefix}",
            prefix=PREFIX,
        )
    if _is_cut(text.removeprefix(PREFIX)):
        return LinkError(
            "the invite is cut off: its end is missing", hint="copy the whole line, to its very end, and paste it again"
        )
    return _mistyped()


def _is_cut(body: str) -> bool:
    """Whether `body` could be the beginning of HOST:PORT.KEYHASH.SECRET.CHECK."""
    address, colon, codes = body.rpartition(":")
    if not colon or body.count("[") != address.count("]"):
        return max(map(len, body.split("."))) < KEY_CHARS  # stops in the address: not one code is there
    _, *fields = codes.split(".")
    widths = (KEY_CHARS, SECRET_CHARS, CHECK_CHARS)[: len(fields)]
    if len(fields) > len(widths):
        return False
    whole = all(len(code) == width for code, width in zip(fields[:-1], widths[:-1], strict=True))
    return whole and (not fields or len(fields[-1]) <= widths[-1])


def _mistyped() -> LinkError:
    return LinkError(
        "the invite is mistyped: its checksum does not match",
        hint="copy and paste it again, or compare it character by character",
    )


class Redemption(Enum):
    """What a secret is worth. All but WRONG are told only to one who knows the secret."""

    ACCEPTED = "accepted"
    EXPIRED = Message("the invite has expired")
    USED_UP = Message("the invite has been used")
    WRONG = Message("the secret is not from this crew")


@dataclass
class _Issued:
    secret_hash: bytes
    expires: float
    uses_left: int

    def outcome(self, now: float) -> Redemption:
        """What its secret is worth at `now`; ACCEPTED while it is open."""
        if self.uses_left == 0:
            return Redemption.USED_UP
        return Redemption.ACCEPTED if now < self.expires else Redemption.EXPIRED


class Invites:
    """The coordinator's invites. `now` is any clock that never goes back, in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._issued: list[_Issued] = []

    def adopt(self, secret_hash: bytes, *, uses: int, now: float) -> None:
        """Open an invite for `uses` machines; `hash_secret` of its secret is all that is known here."""
        done = [issued for issued in self._issued if issued.outcome(now) is not Redemption.ACCEPTED]
        still_open = [issued for issued in self._issued if issued.outcome(now) is Redemption.ACCEPTED]
        new = _Issued(secret_hash, now + VALID_SECONDS, uses)
        self._issued = [*done[-KEPT_CLOSED:], *still_open, new]

    def look_up(self, secret: bytes, *, now: float) -> Redemption:
        """What a secret is worth. Takes the same time for every wrong one."""
        found = self._find(secret)
        return found.outcome(now) if found else Redemption.WRONG

    def use(self, secret: bytes) -> None:
        """One machine was let in with an accepted secret."""
        found = self._find(secret)
        assert found is not None
        found.uses_left -= 1

    def _find(self, secret: bytes) -> _Issued | None:
        given = hash_secret(secret)
        found = [issued for issued in self._issued if hmac.compare_digest(issued.secret_hash, given)]
        return found[0] if found else None


def hash_secret(secret: bytes) -> bytes:
    """All that the coordinator keeps of a secret."""
    return hashlib.sha256(secret).digest()
