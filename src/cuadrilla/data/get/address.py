"""Addresses and file names from users and servers: an address never holds a secret (it is recorded, logged, and shown),
and a name never leaves its folder.
"""

import posixpath
import re
import unicodedata
from collections.abc import Sequence
from pathlib import PurePosixPath
from urllib.parse import parse_qsl, unquote, urlsplit

from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message

WEB_SCHEMES = ("http", "https")
RECORD = "SOURCE.json"
MAX_NAME_BYTES = 200
_SECRET_KEYS = re.compile(r"token|secret|passw|signature|credential|api[-_]?key|^(sig|key|auth)$", re.IGNORECASE)
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(\.|$)", re.IGNORECASE)
_NOT_IN_NAMES = re.compile(r'[<>:"|?*]')


def check_address(text: str) -> str:
    """The address; of the web in ASCII, without its fragment. Raises ConfigError if it is none, or holds a secret."""
    import httpx2 as httpx  # here, since `prepare` needs only names

    hint = "write it as https://HOST/PATH"
    shown = Message("what was given") if "@" in text else repr(text)  # it may hold a password
    try:
        parts = urlsplit(text)
        is_web = parts.scheme in WEB_SCHEMES
        url = str(httpx.URL(text).copy_with(fragment=None)) if is_web else text
        host = urlsplit(url).hostname if parts.port is None or is_web else ""
    except (ValueError, httpx.InvalidURL) as error:
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
    if is_web and (not host or re.search(r"[%\\]", host)):
        raise ConfigError("{address} names no host", address=shown, hint=hint)
    return url


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
