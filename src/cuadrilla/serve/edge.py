"""What every call to a service passes first: who may call, from which page, with how much of what.

An ASGI middleware. Invariants
* Every route but `/healthz` asks for the key, where there is one, compared in constant time: as a bearer token, or as
  the password of basic authentication, with which a browser can open the page.
* A call names the service by one of its `hosts` (DNS rebinding), and comes from no page of another origin.
* A body is JSON, whole, unique in its keys and no longer than allowed, before the application sees any of it. It is
  never unpacked. Whoever sends too slowly is let go.
* Who may call learns why a body is too long before the connection ends, although it sends the whole of it first.
* A refusal is an error as OpenAI's API has it, and says nothing of the inside.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_TO_ALL, PAGE = "/healthz", "/"
BASIC = 'Basic realm="cuadrilla", charset="UTF-8"'
"""By itself: Chromium reads one scheme of a header, and does not ask its user if another one comes first."""
METHODS = ("GET", "HEAD", "POST")
ONCE = ("host", "authorization", "content-type", "content-length", "content-encoding", "transfer-encoding", "origin")
JSON_TYPE = "application/json"
LINGER_SECONDS, LINGER_BODIES = 2.0, 64
"""How long, and of how many bodies' length, what is refused is still received, and thrown away."""
MOST_KEYS = 10_000
"""Of an object: each one that is unknown is an error of its own."""
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one call: bytes of its target and headers, bytes of its body, seconds in which this must arrive."""

    head_bytes: int = 16_384
    body_bytes: int = 2**20
    body_seconds: float = 10.0


SHOULD_RETRY = "x-should-retry"
"""A header that OpenAI's clients and our gateway heed: "false" with an answer that another try would not better."""
TIMED_OUT = "timeout"


class Refusal(Exception):
    """An answer of 4xx or 503, in the form of OpenAI's errors. `param`: the field that it is about."""

    challenge = "Bearer"
    """How to come with a key. At "Basic" a browser asks its user: wanted for the page, not for what the page asks."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, wait_seconds: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.wait_seconds = wait_seconds

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        found = {}
        if self.wait_seconds:
            found["Retry-After"] = str(self.wait_seconds)
        if self.code == TIMED_OUT:
            found[SHOULD_RETRY] = "false"
        if self.status == 401:
            found["WWW-Authenticate"] = self.challenge
        if self.status == 405:
            found["Allow"] = ", ".join(METHODS)
        return found


def timed_out(seconds: float) -> Refusal:
    """Of a request that took longer than any may: whoever asks it again, here or elsewhere, waits as long in vain."""
    return Refusal(503, f"not done within {seconds:g} seconds", code=TIMED_OUT)


KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Edge:
    """`app` behind these checks. `key` "": nobody is asked; only for a service that no other machine reaches.
    `open_to_all`: routes that tell nothing, and ask for no key."""

    def __init__(
        self,
        app: Application,
        *,
        key: str,
        hosts: Collection[str],
        limits: Limits | None = None,
        open_to_all: Collection[str] = (OPEN_TO_ALL,),
    ) -> None:
        self._app = app
        self._key = _digest(key) if key else b""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._limits = limits or Limits()
        self._open_to_all = frozenset(open_to_all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = _headers(scope, most_bytes=self._limits.head_bytes)
            self._check(scope, headers)
            body = await self._body(headers, receive) if scope["method"] == "POST" else b""
        except Refusal as refusal:
            await _answer(refusal, send, lingering=partial(self._discard, receive) if refusal.status == 413 else None)
            return
        await self._app(scope, _replaying(body, receive), send)

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        if headers.get("host", "").lower() not in self._hosts:
            raise Refusal(421, "this service does not go by that name (header Host)", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() not in self._hosts:
            raise Refusal(403, "pages of other origins may not call this service", code="wrong_origin")
        if scope["path"] not in self._open_to_all and self._key:
            given = _digest(_credential(headers.get("authorization", "")))
            if not hmac.compare_digest(given, self._key):
                refusal = Refusal(401, "the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")
                if scope["path"] == PAGE:
                    refusal.challenge = BASIC
                raise refusal
        if scope["method"] not in METHODS:
            raise Refusal(405, f"the method is none of {', '.join(METHODS)}")
        if scope["method"] == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
                raise Refusal(415, f"the body must be {JSON_TYPE} (header Content-Type)")
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise Refusal(415, "a compressed body is not read (header Content-Encoding)")

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        most = self._limits.body_bytes
        too_large = Refusal(413, f"the body is longer than {most:,} bytes", code="too_large")
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    event = await receive()
                    body += event.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if event["type"] == "http.disconnect" or not event.get("more_body"):
                        break
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self._limits.body_seconds:g} seconds") from None
        check_json(bytes(body))
        return bytes(body)

    async def _discard(self, receive: Receive) -> None:
        """Clients read an answer when they have sent everything."""
        left = LINGER_BODIES * self._limits.body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while left > 0:
                    event = await receive()
                    left -= len(event.get("body", b""))
                    if event["type"] == "http.disconnect" or not event.get("more_body"):
                        break


def check_json(body: bytes) -> Any:
    """The value of a body. Raises Refusal for what is not JSON, or JSON that readers might understand differently."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if ESCAPED_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails at half of a pair
    except UnicodeError:
        raise Refusal(400, "the body has characters that are not Unicode") from None
    except json.JSONDecodeError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    except (ValueError, RecursionError):
        raise Refusal(400, "the body has a number that is too long, or is nested too deeply") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(pairs) > MOST_KEYS:
        raise Refusal(400, f"an object of the body has more than {MOST_KEYS:,} keys")
    if len(found) < len(pairs):
        raise Refusal(400, "the body is not JSON: a key stands twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise Refusal(400, f"the body is not JSON: {name} is not a number")


def _digest(text: str) -> bytes:
    """Of equal length whatever the text, so that its comparison tells nothing."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _credential(header: str) -> str:
    """The key in a header `Authorization`, "" where there is none."""
    scheme, _, value = header.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic":
            try:
                return base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return ""
    return ""


def _headers(scope: Scope, *, most_bytes: int) -> dict[str, str]:
    """Raises Refusal for too many, and for what a proxy before us may have read otherwise: one of ours that stands
    twice, two lengths of one body."""
    target = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    if target + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > most_bytes:
        raise Refusal(431, f"the head of the request is longer than {most_bytes:,} bytes")
    found: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").lower()
        if name in found and name in ONCE:
            raise Refusal(400, f"the header {name} stands twice")
        found[name] = raw_value.decode("latin-1").strip()
    if "transfer-encoding" in found and "content-length" in found:
        raise Refusal(400, "a body has one length: Transfer-Encoding or Content-Length")
    return found


def _replaying(body: bytes, receive: Receive) -> Receive:
    """The body in one event, then what comes after it: only that the caller has left."""
    given = False

    async def received() -> Event:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


def raw_refusal(refusal: Refusal) -> bytes:
    return raw_answer(refusal.status, refusal.body, **refusal.headers)


def raw_answer(status: int, body: Mapping[str, Any], **more: str) -> bytes:
    """As it goes over a connection that ends with it."""
    content, headers = _parts(body, more)
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *map(": ".join, headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def _parts(body: Mapping[str, Any], more: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    content = json.dumps(body).encode()
    length = str(len(content))
    return content, {"Content-Type": JSON_TYPE, "Content-Length": length, "Connection": "close", **more}


async def _answer(refusal: Refusal, send: Send, *, lingering: Callable[[], Awaitable[None]] | None = None) -> None:
    """The connection ends: what is left of the body is not worth reading; `lingering` throws it away."""
    content, headers = _parts(refusal.body, refusal.headers)
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": lingering is not None})
    if lingering is not None:
        await lingering()
        await send({"type": "http.response.body", "body": b""})
