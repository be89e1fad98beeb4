"""What every call to a service passes first: who may call, from which page, with how much of what.

An ASGI middleware. Invariants
* Every route but `/healthz` asks for the key, where there is one, compared in constant time: as a bearer token, or as
  the password of basic authentication, with which a browser can open the page.
* A call names the service by one of its `hosts` (DNS rebinding), and comes from no page of another origin.
* A body is JSON, whole, unique in its keys and no longer than allowed, before the application sees any of it. It is
  never unpacked. Whoever sends or reads too slowly is let go.
* A refusal is an error as OpenAI's API has it, and says nothing of the inside.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_TO_ALL = "/healthz"
METHODS = ("GET", "HEAD", "POST")
JSON_TYPE = "application/json"
ESCAPED_SURROGATE = re.compile(r"\\\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one call: bytes of its body, seconds in which it must arrive, seconds until a part of the answer is read."""

    body_bytes: int = 2**20
    body_seconds: float = 10.0
    read_seconds: float = 30.0


class Refusal(Exception):
    """An answer of 4xx or 503, in the form of OpenAI's errors. `param`: the field that it is about."""

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
        if self.status == 401:
            found["WWW-Authenticate"] = 'Bearer, Basic realm="cuadrilla", charset="UTF-8"'
        if self.status == 405:
            found["Allow"] = ", ".join(METHODS)
        return found


KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Edge:
    """`app` behind these checks. `key` "": nobody is asked; only for a service that no other machine reaches."""

    def __init__(self, app: Application, *, key: str, hosts: Collection[str], limits: Limits | None = None) -> None:
        self._app = app
        self._key = _digest(key) if key else b""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._limits = limits or Limits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = _headers(scope)
            self._check(scope, headers)
            body = await self._body(headers, receive) if scope["method"] == "POST" else b""
        except Refusal as refusal:
            await _answer(refusal, self._within(send))
            return
        await self._app(scope, _replaying(body, receive), self._within(send))

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        if headers.get("host", "").lower() not in self._hosts:
            raise Refusal(421, "this service does not go by that name (header Host)", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() not in self._hosts:
            raise Refusal(403, "pages of other origins may not call this service", code="wrong_origin")
        if scope["path"] != OPEN_TO_ALL and self._key:
            given = _digest(_credential(headers.get("authorization", "")))
            if not hmac.compare_digest(given, self._key):
                raise Refusal(401, "the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")
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
        if length.isdigit() and int(length) > most:
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

    def _within(self, send: Send) -> Send:
        async def sent(event: Event) -> None:
            async with asyncio.timeout(self._limits.read_seconds):
                await send(event)

        return sent


def check_json(body: bytes) -> Any:
    """The value of a body. Raises Refusal for what is not JSON, or JSON that readers might understand differently."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if ESCAPED_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails at half of a pair
    except UnicodeError:
        raise Refusal(400, "the body has characters that are not Unicode") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


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


def _headers(scope: Scope) -> dict[str, str]:
    """Raises Refusal for one of ours that stands twice: a proxy before us may have read the other."""
    found: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").lower()
        if name in found and name in ("host", "authorization", "content-type", "content-length", "origin"):
            raise Refusal(400, f"the header {name} stands twice")
        found[name] = raw_value.decode("latin-1").strip()
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


async def _answer(refusal: Refusal, send: Send) -> None:
    """The connection ends: what is left of the body is not worth reading."""
    content = json.dumps(refusal.body).encode()
    headers = {"Content-Type": JSON_TYPE, "Content-Length": str(len(content)), "Connection": "close", **refusal.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
