"""Where bytes come from: the protocol that every kind of address answers to, and what may be an address or a name.

An origin is asked for a file from some byte on, with the validator of what is already here. It answers with a stream
that starts there if the file is still the same, else at 0. Addresses and names come from users and from servers: an
address never holds a secret (it is recorded, logged, and shown), and a name never leaves its folder.
"""

import posixpath
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.messages import Message

WEB_SCHEMES = ("http", "https")
RECORD = "SOURCE.json"
MAX_NAME_BYTES = 200
_SECRET_KEYS = re.compile(r"token|secret|passw|signature|credential|api[-_]?key|^(sig|key|auth)$", re.IGNORECASE)
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(\.|$)", re.IGNORECASE)
_NOT_IN_NAMES = re.compile(r'[<>:"|?*]')


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Bytes on their way. `chunks` raises PassingError for what another try may cure."""

    start: int
    """Of the first byte in `chunks`, in the file."""
    total_bytes: int | None
    """Of the whole file, as announced."""
    validator: str
    """What tells this content from a later one at the same address; empty if nothing does, then it cannot resume."""
    name: str
    """What the other side calls the file, unchecked; may be empty."""
    media_type: str
    chunks: Iterator[bytes]
    close: Callable[[], None]


class Origin(Protocol):
    """One file somewhere else."""

    def open(self, offset: int, validator: str) -> Stream:
        """From `offset` if the content is still that of `validator`, else from 0.

        Raises PassingError for what another try may cure, LinkError for the rest.
        """


class PassingError(LinkError):
    """A failure that may be gone at the next try."""

    def __init__(self, message: str, /, *, wait_seconds: float = 0.0, **fields: Any) -> None:
        hint = Message("check this machine's network, then run the same command again")
        super().__init__(message, hint=hint, **fields)
        self.wait_seconds = wait_seconds


class TooLargeError(ConfigError):
    """More than may be fetched without asking."""


def check_address(text: str) -> str:
    """The address in ASCII, without its fragment. Raises ConfigError if it is none, or if it holds a secret."""
    hint = "write it as https://HOST/PATH"
    shown = Message("what was given") if "@" in text else repr(text)  # it may hold a password
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        ascii_host = host if ":" in host else host.encode("idna").decode() if host else ""
        ascii_host.encode("ascii")
    except ValueError as error:
        raise ConfigError("{address} is not an address: {error}", address=shown, error=error, hint=hint) from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "the address holds a user name or a password; these would be recorded with the data",
            hint="use an address without them, or fetch the file by other means and prepare it from there",
        )
    for key, _ in parse_qsl(parts.query, keep_blank_values=True, max_num_fields=1000):
        if _SECRET_KEYS.search(key):
            raise ConfigError(
                "the address holds a secret ({key!r}); it would be recorded with the data",
                key=key,
                hint="use an address without it, or fetch the file by other means and prepare it from there",
            )
    if parts.scheme in WEB_SCHEMES and not ascii_host:
        raise ConfigError("{address} names no host", address=shown, hint=hint)
    if re.search(r"[\x00-\x20\x7f\\]", ascii_host):
        raise ConfigError("{address} is not an address", address=shown, hint=hint)
    if parts.scheme not in WEB_SCHEMES:
        return text
    place = (f"[{ascii_host}]" if ":" in ascii_host else ascii_host) + (f":{port}" if port is not None else "")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._", errors="surrogatepass")
    query = quote(parts.query, safe="/%:@!$&'()*+,;=~-._?", errors="surrogatepass")
    return urlunsplit((parts.scheme, place, path, query, ""))


def safe_name(text: str) -> str:
    """A file name that stays in its folder and is a plain, visible name on every system, whatever `text` is."""
    name = unicodedata.normalize("NFC", text.encode(errors="replace").decode()).replace("\\", "/").split("/")[-1]
    name = "".join(character for character in name if unicodedata.category(character)[0] != "C")
    name = _NOT_IN_NAMES.sub("_", name).strip().lstrip(".").strip().rstrip(". ")
    stem, suffix = PurePosixPath(name).stem, PurePosixPath(name).suffix
    if len(name.encode()) > MAX_NAME_BYTES:
        suffix = suffix if len(suffix.encode()) < 20 else ""
        stem = stem.encode()[: MAX_NAME_BYTES - 20].decode(errors="ignore").rstrip(". ")
        name = stem + suffix
    if not name:
        return "download"
    return f"_{name}" if _RESERVED.match(name) or name.lower() == RECORD.lower() else name


def name_in(address: str) -> str:
    """The last part of an address's path, unchecked."""
    return unquote(urlsplit(address).path.rstrip("/").rpartition("/")[2])


def distinct_names(paths: Sequence[str]) -> dict[str, str]:
    """File names without their folders if they differ, else with them."""
    short = {path: safe_name(path) for path in paths}
    if len({name.lower() for name in short.values()}) == len(paths):
        return short
    common = len(posixpath.commonpath(paths)) if len(paths) > 1 else 0
    return {path: safe_name(path[common:].strip("/").replace("/", "_")) for path in paths}
