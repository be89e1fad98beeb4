"""HTTP and HTTPS by httpx: one GET per try, strict about where it leads and what comes back.

Certificates are verified by what the system trusts (a company's own authority included; `SSL_CERT_FILE` adds one), and
the system's proxies are used. Redirects never lead from https to http, and the token does not go along to another host.
Ranges and validators are those of RFC 9110, sections 13 and 14.
"""

import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from email.message import EmailMessage
from urllib.parse import urlsplit

import httpx2 as httpx

from cuadrilla.data.get.address import check_address
from cuadrilla.data.get.stream import PassingError, Stream
from cuadrilla.errors import LinkError
from cuadrilla.messages import Message
from cuadrilla.version import __version__

MAX_REDIRECTS = 5
SILENCE_SECONDS = 30.0
MAX_WAIT_SECONDS = 120.0
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_COMPRESSED_NAMES = (".gz", ".tgz", ".svgz")


class Web:
    """A file behind an http or https address. `token` goes to the address's own host only, as a bearer token."""

    def __init__(self, url: str, *, token: str = "", silence_seconds: float = SILENCE_SECONDS) -> None:
        self._url = check_address(url)
        self._silence_seconds = silence_seconds
        self._headers = {
            "User-Agent": f"cuadrilla/{__version__}",
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }

    def open(self, offset: int, validator: str) -> Stream:
        """See `Origin.open`. Raises LinkError for what the server refuses or what does not make sense."""
        is_rest = bool(offset and validator)
        client = httpx.Client(
            verify=ssl.create_default_context(),
            timeout=self._silence_seconds,
            follow_redirects=True,
            max_redirects=MAX_REDIRECTS,
            event_hooks={"response": [_check_redirect]},
        )
        try:
            headers = {"Range": f"bytes={offset}-", "If-Range": validator} if is_rest else {}
            request = client.build_request("GET", self._url, headers={**self._headers, **headers})
            response = client.send(request, stream=True)
            found = _validator(response.headers)
            if is_rest and response.status_code in (206, 416):
                start, total = _content_range(response.headers.get("Content-Range", ""))
                if start == offset and found in ("", validator):
                    return self._stream(client, response, start=start, total=total, validator=validator)
                client.close()
                return self.open(0, "")  # it cannot go on from where we are
            if response.status_code != 200:
                raise _refusal(self._url, response)
            length = response.headers.get("Content-Length", "")
            total = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
            return self._stream(client, response, start=0, total=total, validator=found)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            client.close()
            raise _unreachable(self._url, error) from error
        except BaseException:
            client.close()
            raise

    def _stream(
        self, client: httpx.Client, response: httpx.Response, *, start: int, total: int | None, validator: str
    ) -> Stream:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        # Servers label a stored .gz as gzip-encoded; decoding it would change the file.
        is_stored = "gzip" in encoding and urlsplit(self._url).path.lower().endswith(_COMPRESSED_NAMES)
        if encoding not in ("", "identity") and not is_stored:
            raise LinkError(
                "the server sends the file encoded as {encoding!r} although asked not to",
                encoding=encoding,
                hint="take the file from another address",
            )
        return Stream(
            start=start,
            total_bytes=total,
            validator=validator,
            name=_disposed_name(response.headers),
            media_type=response.headers.get("Content-Type", "").split(";")[0].strip().lower(),
            chunks=iter(()) if response.status_code == 416 else _guarded(response.iter_raw()),
            close=client.close,
        )


def _check_redirect(response: httpx.Response) -> None:
    if response.next_request and response.url.scheme == "https" and response.next_request.url.scheme == "http":
        raise LinkError(
            "{url} redirects from https to http, where anybody could change the data",
            url=response.url,
            hint="give the address it leads to, if you trust that",
        )


def _unreachable(url: str, error: Exception) -> LinkError:
    host = urlsplit(url).netloc
    causes: list[BaseException] = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    reason = str(error) or type(error).__name__
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in causes):
        return LinkError(
            "{host} cannot prove who it is: {reason}",
            host=host,
            reason=reason,
            hint="check this machine's clock; behind a company proxy, set SSL_CERT_FILE to its certificate",
        )
    if any(isinstance(each, socket.gaierror) and each.errno != socket.EAI_AGAIN for each in causes):
        return LinkError(
            "no address is known for {host}", host=host, hint="check the spelling and this machine's network"
        )
    if not isinstance(error, httpx.TransportError) or isinstance(error, httpx.UnsupportedProtocol):
        return LinkError("{url}: {reason}", url=url, reason=reason, hint="open the address in a browser")
    return PassingError("{host}: {reason}", host=host, reason=reason)


def _refusal(url: str, response: httpx.Response) -> LinkError:
    code = response.status_code
    status = f"{code} {response.reason_phrase}".strip()
    if code in _PASSING_STATUS:
        after = response.headers.get("Retry-After", "").strip()
        wait = float(after) if re.fullmatch(r"[0-9]{1,9}", after) else 0.0
        if wait <= MAX_WAIT_SECONDS:
            host = urlsplit(url).netloc
            return PassingError("{host} answers {status}", host=host, status=status, wait_seconds=wait)
        hint = Message("the server asks us to try again in {wait:,.0f} s", wait=wait)
        return LinkError("{url}: {status}", url=url, status=status, hint=hint)
    hint = Message("open the address in a browser; it may have moved")
    if code in (401, 403):
        hint = Message("it needs an account, or its licence must be accepted; for the hub: `hf auth login`")
    elif code in (404, 410):
        hint = Message("check the address; `cuadrilla data get --list` shows known corpora")
    return LinkError("{url}: {status}", url=url, status=status, hint=hint)


def _validator(headers: Mapping[str, str]) -> str:
    """A strong ETag, or else the date of the last change; weak tags cannot vouch for bytes."""
    tag = headers.get("ETag", "").strip()
    if re.fullmatch(r'"[\x21\x23-\x7e]*"', tag):
        return tag
    date = headers.get("Last-Modified", "").strip()
    return date if not tag and re.fullmatch(r"[\x20-\x7e]{1,60}", date) else ""


def _content_range(text: str) -> tuple[int, int | None]:
    """(first byte, size of the whole) of a 206; (size, size) of a 416, which says that nothing is left to send; -1 if
    it cannot be read."""
    given = re.fullmatch(r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/(?:([0-9]{1,18})|\*)", text.strip())
    if given is None or given[1] is given[2] is None:
        return -1, None
    return int(given[1] or given[2]), int(given[2]) if given[2] else None


def _disposed_name(headers: Mapping[str, str]) -> str:
    """The name in Content-Disposition (RFC 6266), unchecked."""
    parsed = EmailMessage()
    parsed["Content-Disposition"] = re.sub(r"[\x00-\x1f]", "", headers.get("Content-Disposition", ""))
    try:
        return parsed.get_filename("")
    except (LookupError, UnicodeError):
        return ""


def _guarded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Failures on the way as PassingError."""
    try:
        yield from chunks
    except httpx.TimeoutException as error:
        raise PassingError("the server fell silent") from error
    except httpx.HTTPError as error:
        raise PassingError("the connection broke: {reason}", reason=str(error) or type(error).__name__) from error
