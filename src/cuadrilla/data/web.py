"""A file by HTTP or HTTPS, in as many tries as it takes, each going on where the last one was cut.

A try goes on only from what a validator (a strong ETag, else the date of the last change; RFC 9110, 13 and 14) says is
still the same file. Certificates are verified by what the system trusts (a company's own authority included;
`SSL_CERT_FILE` adds one), and the system's proxies are used.
"""

import hashlib
import os
import ssl
from collections.abc import Callable
from email.message import Message as Header
from pathlib import Path
from time import sleep
from urllib.parse import unquote, urlsplit

import httpx2 as httpx

from cuadrilla.errors import DataError, LinkError
from cuadrilla.messages import Message
from cuadrilla.rundir import storage_errors
from cuadrilla.version import __version__

MAX_TRIES = 6
"""In a row, without a byte."""
SILENCE_SECONDS = 30.0
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all or 0)."""
Report = Callable[[str], object]


class Part:
    """The beginning of a file that is on its way: hidden, so that `data prepare` does not see it."""

    def __init__(self, folder: Path, *, url: str) -> None:
        key = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:16]
        self.path, self._tag = folder / f".{key}.part", folder / f".{key}.tag"
        self.validator = self._tag.read_text() if self._tag.exists() else ""

    @property
    def num_bytes(self) -> int:
        """What can be gone on from."""
        return self.path.stat().st_size if self.validator and self.path.exists() else 0

    def begin(self, validator: str) -> None:
        """Make void what is there."""
        self.path.unlink(missing_ok=True)
        self.validator = validator
        self._tag.write_text(validator)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._tag.unlink(missing_ok=True)


def receive(url: str, part: Part, *, token: str = "", progress: Progress, report: Report) -> str:
    """All of a file into `part`; how its server calls it. Raises LinkError, DataError, ResourceError.

    `token` is sent to the address's own host only.
    """
    tries = 0
    while True:
        before = part.num_bytes
        try:
            return _try(url, part, token=token, progress=progress)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            reason = str(error) or type(error).__name__
            tries = 1 if part.num_bytes > before else tries + 1
            is_new = isinstance(error, httpx.ConnectError) and not before
            may_pass = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
            if is_new or not may_pass or tries == MAX_TRIES:
                raise LinkError(
                    "{url}: {reason}",
                    url=url,
                    reason=reason,
                    hint="check the address and this machine's network (behind a company proxy, set SSL_CERT_FILE), "
                    "and run the same command again: what has arrived is kept if the server can resume",
                ) from error
        report(Message("{reason}; trying again in {wait:.0f} s", reason=reason, wait=2.0**tries))
        sleep(2.0**tries)


def _try(url: str, part: Part, *, token: str, progress: Progress) -> str:
    start = part.num_bytes
    headers = {"User-Agent": f"cuadrilla/{__version__}", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": part.validator}
    with (
        httpx.Client(verify=ssl.create_default_context(), timeout=SILENCE_SECONDS) as client,
        client.stream("GET", url, headers=headers, follow_redirects=True) as response,
    ):
        _pour(response, part, start=start, progress=progress)
        return _name(response)


def _pour(response: httpx.Response, part: Part, *, start: int, progress: Progress) -> None:
    """What this answer brings, into the part. Raises TransportError if that does not continue it."""
    validator = _validator(response.headers)
    if response.status_code in (206, 416) and start:
        goes_on = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if not goes_on or validator not in ("", part.validator):
            part.discard()
            raise httpx.ReadError("the file has changed")
    elif response.status_code == 200:
        if response.headers.get("Content-Type", "").startswith("text/html") and not _name(response).endswith("html"):
            raise DataError(
                "{url} sends a web page instead of a file",
                url=response.url,
                hint="open the address in a browser: it may ask to log in, or the file may have moved",
            )
        start = 0
    else:
        raise _refusal(response)
    stage = Message("fetching {name}", name=_name(response))
    total = start + int(response.headers.get("Content-Length", 0) or -start)
    with storage_errors(part.path):
        if start == 0:
            part.begin(validator)
        with open(part.path, "ab", buffering=0) as file:
            for chunk in response.iter_raw():
                file.write(chunk)
                start += len(chunk)
                progress(stage, start, total)
            os.fsync(file.fileno())


def _refusal(response: httpx.Response) -> Exception:
    status = f"{response.status_code} {response.reason_phrase}".strip()
    if response.status_code in _PASSING_STATUS:
        return httpx.ReadError(f"{response.url.host} answers {status}")
    hint = "check the address (`cuadrilla data get --list` shows known corpora); it may need an account"
    return LinkError("{url}: {status}", url=response.url, status=status, hint=hint)


def _validator(headers: httpx.Headers) -> str:
    """A strong ETag, or else the date of the last change; weak tags cannot vouch for bytes."""
    tag = str(headers.get("ETag", ""))
    if tag:
        return tag if tag.startswith('"') else ""
    return str(headers.get("Last-Modified", ""))


def _name(response: httpx.Response) -> str:
    """How the server calls the file (RFC 6266), or how the address that was asked for ends; unchecked."""
    header = Header()
    header["Content-Disposition"] = response.headers.get("Content-Disposition", "")
    asked = response.history[0].url if response.history else response.url
    return header.get_filename("") or unquote(urlsplit(str(asked)).path.rstrip("/").rpartition("/")[2])
