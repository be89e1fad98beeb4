"""HTTP and HTTPS: one GET per try, strict about where it leads and what comes back.

The standard library's client, because it needs nothing installed, trusts what the system trusts (a company's own
authority included) and knows the system's proxies. Of its openers only those for http, https and proxies are used:
no file:, ftp: or data:, wherever a redirect points. Certificates are always verified (`SSL_CERT_FILE` adds one, as
everywhere). Redirects are followed here: at most five, never from https to http, and the token does not go along to
another host. Ranges and validators are those of RFC 9110, sections 13 and 14.
"""

import http.client
import re
import socket
import ssl
import zlib
from collections.abc import Iterator
from email.message import Message as Headers
from email.utils import parsedate_to_datetime
from urllib.error import URLError
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, UnknownHandler

from cuadrilla.data.get.origin import WEB_SCHEMES, PassingError, Stream, check_address
from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.messages import Message
from cuadrilla.version import __version__

MAX_REDIRECTS = 5
SILENCE_SECONDS = 30.0
MAX_WAIT_SECONDS = 120.0
READ_BYTES = 2**18
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_COMPRESSED_NAMES = (".gz", ".tgz", ".svgz")


class Web:
    """A file behind an http or https address. `token` goes to the address's own host only, as a bearer token."""

    def __init__(self, url: str, *, token: str = "", silence_seconds: float = SILENCE_SECONDS) -> None:
        self._url = check_address(url)
        self._silence_seconds = silence_seconds
        self._headers = {
            "User-Agent": f"cuadrilla/{__version__}",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }

    def open(self, offset: int, validator: str) -> Stream:
        """See `Origin.open`. Raises LinkError for what the server refuses or what does not make sense."""
        ranged = {"Range": f"bytes={offset}-", "If-Range": validator} if offset and validator else {}
        response = self._follow({**self._headers, **ranged})
        try:
            return self._stream(response, offset=offset if ranged else 0, validator=validator)
        except BaseException:
            response.close()
            raise

    def _follow(self, headers: dict[str, str]) -> http.client.HTTPResponse:
        url = self._url
        for _ in range(MAX_REDIRECTS + 1):
            response = _request(url, headers, timeout=self._silence_seconds)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            location = response.headers.get("Location", "")
            response.close()
            target = _redirected(url, location)
            if _place(target) != _place(url):
                headers = {key: value for key, value in headers.items() if key != "Authorization"}
            url = target
        raise LinkError(
            "{url}: more than {most} redirects",
            url=self._url,
            most=MAX_REDIRECTS,
            hint="open the address in a browser; it may have moved",
        )

    def _stream(self, response: http.client.HTTPResponse, *, offset: int, validator: str) -> Stream:
        headers = response.headers
        found = _validator(headers)
        start, total = 0, response.length
        if response.status in (206, 416):
            try:
                start, total = _content_range(headers.get("Content-Range", ""))
            except ValueError:
                start, total = -1, None
            is_other = found not in ("", validator)
            if start != offset or is_other or not offset:
                return self._start_over(response)
            found = validator
        elif response.status != 200:
            raise _refusal(self._url, response)
        chunks, is_plain = _decoded(response, name=urlsplit(self._url).path)
        return Stream(
            start=start,
            total_bytes=total if is_plain else None,
            validator=found if is_plain else "",
            name=_disposed_name(headers),
            media_type=headers.get_content_type() if headers.get("Content-Type") else "",
            chunks=_guarded(chunks),
            close=response.close,
        )

    def _start_over(self, response: http.client.HTTPResponse) -> Stream:
        """The server cannot go on from where we are: ask for the whole file."""
        response.close()
        whole = self._follow(self._headers)
        try:
            if whole.status in (206, 416):
                raise LinkError(
                    "{url} answers {status} when asked for the whole file",
                    url=self._url,
                    status=whole.status,
                    hint="try again later, or take the file from another address",
                )
            return self._stream(whole, offset=0, validator="")
        except BaseException:
            whole.close()
            raise


def _request(url: str, headers: dict[str, str], *, timeout: float) -> http.client.HTTPResponse:
    opener = OpenerDirector()
    for handler in (ProxyHandler(), HTTPHandler(), UnknownHandler()):
        opener.add_handler(handler)
    if urlsplit(url).scheme == "https":
        opener.add_handler(HTTPSHandler(context=ssl.create_default_context()))
    opener.addheaders = []
    try:
        response = opener.open(Request(url, headers=headers), timeout=timeout)
    except URLError as error:
        raise _unreachable(url, error.reason) from error
    except (OSError, http.client.HTTPException) as error:
        raise PassingError("{host}: {reason}", host=_place(url)[1], reason=_reason(error)) from error
    assert isinstance(response, http.client.HTTPResponse), "only http and https are opened"
    return response


def _unreachable(url: str, reason: object) -> LinkError:
    host = _place(url)[1]
    if isinstance(reason, ssl.SSLCertVerificationError):
        return LinkError(
            "{host} cannot prove who it is: {reason}",
            host=host,
            reason=reason.verify_message,
            hint="check this machine's clock; behind a company proxy, set SSL_CERT_FILE to its certificate",
        )
    if isinstance(reason, ssl.SSLError):
        return LinkError(
            "{host}: {reason}",
            host=host,
            reason=reason,
            hint="perhaps the address begins with http://, or a proxy interferes",
        )
    if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
        return LinkError(
            "no address is known for {host}", host=host, hint="check the spelling and this machine's network"
        )
    return PassingError("{host}: {reason}", host=host, reason=_reason(reason))


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return Message("no answer in time")
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)


def _redirected(url: str, location: str) -> str:
    if not location:
        raise LinkError("{url} redirects to nowhere", url=url, hint="open the address in a browser; it may have moved")
    hint = "give the address it leads to, if you trust that"
    target = urljoin(url, location)
    if urlsplit(target).scheme not in WEB_SCHEMES:
        raise LinkError("{url} redirects to something that is not http or https", url=url, hint=hint)
    if urlsplit(url).scheme == "https" and urlsplit(target).scheme == "http":
        raise LinkError("{url} redirects from https to http, where anybody could change the data", url=url, hint=hint)
    parts = urlsplit(target)
    if "@" in parts.netloc:
        raise LinkError("{url} redirects to an address with a password", url=url, hint=hint)
    try:
        # Servers sign addresses for a minute (a store behind the hub does): such a query is used and not recorded.
        bare = check_address(parts._replace(query="").geturl())
    except ConfigError as error:
        raise LinkError("{url} redirects to something that is not an address", url=url, hint=hint) from error
    query = re.sub(r"[^\x21-\x7e]", "", parts.query)
    return f"{bare}?{query}" if query else bare


def _place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _refusal(url: str, response: http.client.HTTPResponse) -> LinkError:
    status = f"{response.status} {response.reason}".strip()
    if response.status in _PASSING_STATUS:
        wait = _retry_after(response.headers)
        if wait > MAX_WAIT_SECONDS:
            return LinkError(
                "{url}: {status}",
                url=url,
                status=status,
                hint="the server asks us to try again in {wait:,.0f} s",
                wait=wait,
            )
        return PassingError("{host} answers {status}", host=_place(url)[1], status=status, wait_seconds=wait)
    if response.status in (401, 403):
        return LinkError(
            "{url}: {status}",
            url=url,
            status=status,
            hint="it needs an account, or its licence must be accepted; for the hub: `hf auth login`",
        )
    if response.status in (404, 410):
        return LinkError(
            "{url}: {status}",
            url=url,
            status=status,
            hint="check the address; `cuadrilla data get --list` shows known corpora",
        )
    return LinkError("{url}: {status}", url=url, status=status, hint="open the address in a browser; it may have moved")


def _retry_after(headers: Headers) -> float:
    """Seconds, at least 0; a date counts from the server's own clock, since ours may be wrong."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - parsedate_to_datetime(headers.get("Date", ""))).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _validator(headers: Headers) -> str:
    """A strong ETag, or else the date of the last change; weak tags cannot vouch for bytes."""
    tag = headers.get("ETag", "").strip()
    if re.fullmatch(r'"[\x21\x23-\x7e]*"', tag):
        return tag
    date = headers.get("Last-Modified", "").strip()
    return date if not tag and re.fullmatch(r"[\x20-\x7e]{1,60}", date) else ""


def _content_range(text: str) -> tuple[int, int | None]:
    """(first byte, size of the whole) of a 206; (size, size) of a 416, which says that nothing is left to send."""
    if whole := re.fullmatch(r"bytes \*/([0-9]{1,18})", text.strip()):
        return int(whole[1]), int(whole[1])
    given = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", text.strip())
    if not given:
        raise ValueError(text)
    return int(given[1]), None if given[3] == "*" else int(given[3])


def _disposed_name(headers: Headers) -> str:
    """The name in Content-Disposition (RFC 6266), unchecked."""
    text = headers.get("Content-Disposition", "")
    if extended := re.search(r"filename\*\s*=\s*([\w-]+)'[\w-]*'([^;\s]+)", text, re.IGNORECASE):
        charset = extended[1].lower()
        if charset in ("utf-8", "iso-8859-1"):
            return unquote(extended[2], encoding=charset, errors="replace")
    if plain := re.search(r'filename\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))', text, re.IGNORECASE):
        return re.sub(r"\\(.)", r"\1", plain[1]) if plain[1] is not None else plain[2]
    return ""


def _decoded(response: http.client.HTTPResponse, *, name: str) -> tuple[Iterator[bytes], bool]:
    """(the file's bytes, whether they are the bytes on the wire)."""
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if response.status == 416:
        return iter(()), True
    # Servers label a stored .gz as gzip-encoded; decoding it would change the file.
    if encoding in ("", "identity") or (encoding in ("gzip", "x-gzip") and name.lower().endswith(_COMPRESSED_NAMES)):
        return _raw(response), True
    if encoding in ("gzip", "x-gzip", "deflate") and response.status == 200:
        return _inflated(response), False
    raise LinkError(
        "the server sends the file encoded as {encoding!r} although asked not to",
        encoding=encoding,
        hint="take the file from another address",
    )


def _raw(response: http.client.HTTPResponse) -> Iterator[bytes]:
    # read1 hands over what has come: a timeout then measures silence, and loses nothing.
    while chunk := response.read1(READ_BYTES):
        yield chunk


def _inflated(response: http.client.HTTPResponse) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, by its header
    for chunk in _raw(response):
        while chunk:
            yield decoder.decompress(chunk, READ_BYTES)
            chunk = decoder.unconsumed_tail
    if not decoder.eof:
        raise PassingError("the connection ended early")


def _guarded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Failures on the way as PassingError."""
    try:
        yield from chunks
    except TimeoutError as error:
        raise PassingError("the server fell silent") from error
    except (OSError, http.client.HTTPException) as error:
        raise PassingError("the connection broke: {reason}", reason=_reason(error)) from error
    except zlib.error as error:
        raise PassingError("the download cannot be unpacked: {error}", error=error) from error
