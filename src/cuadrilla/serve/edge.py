"""What every call to a service passes first: who may call, from which page, with how much. An ASGI middleware.

Invariants
* Every route but those `open_to_all` asks for the key, where there is one, compared in constant time: as a bearer
  token, or as the password of basic authentication, with which a browser can open the page.
* Without a key a call names the service by a name of this machine (DNS rebinding). No page of another origin may call.
* A body is JSON of at most `MAX_BODY_BYTES`, which arrives within `BODY_SECONDS`. A longer one is received to its end
  and thrown away, as clients read an answer only when they have sent everything.
* At most `MAX_CALLS` are answered at once; the next one is told when to come again.
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
from typing import Any

from starlette.responses import Response

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_TO_ALL, PAGE = ("/health", "/healthz"), "/"
BASIC = 'Basic realm="cuadrilla", charset="UTF-8"'
"""By itself: Chromium reads one scheme of a header, and does not ask its user if another one comes first."""
MAX_CALLS = 512
MAX_BODY_BYTES, BODY_SECONDS = 8 * 2**20, 10.0
MAX_DISCARDED_BYTES = 64 * MAX_BODY_BYTES
"""A body that says that it is longer is refused unread."""
OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
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

    def response(self, **more: str) -> Response:
        """The answer, with `more` headers."""
        content, headers = json.dumps(self.body), {**self.headers, **more}
        return Response(content, status_code=self.status, headers=headers, media_type="application/json")

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
            found["x-should-retry"] = "false"  # OpenAI's clients heed it
        if self.status == 401:
            found["WWW-Authenticate"] = self.challenge
        return found


def timed_out(seconds: float) -> Refusal:
    """The refusal of a request that took longer than any may: asked again, it would take as long in vain."""
    return Refusal(503, f"not done within {seconds:g} seconds", code=TIMED_OUT)


TOO_LONG = Refusal(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes", code="too_large")


class Edge:
    """`app` behind these checks. `key` "": nobody is asked; only for a service that no other machine reaches.
    `open_to_all`: routes that tell nothing, and ask for no key."""

    def __init__(self, app: Application, *, key: str, open_to_all: Collection[str] = OPEN_TO_ALL) -> None:
        self._app = app
        self._key = _digest(key) if key else b""
        self._open_to_all = frozenset(open_to_all)
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1").strip() for name, value in scope["headers"]}
        try:
            self._check(scope, headers)
            body = await _body(receive) if scope["method"] == "POST" else b""
            if self._num_calls >= MAX_CALLS and scope["path"] not in OPEN_TO_ALL:
                raise Refusal(503, "too many calls at once", code="overloaded", wait_seconds=1)
        except Refusal as refusal:
            await refusal.response(Connection="close")(scope, receive, send)  # the rest of a body is not read
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server leaves the body out
        self._num_calls += 1
        try:
            await self._app({**scope, "method": method}, _replaying(body, receive), send)
        finally:
            self._num_calls -= 1

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if not self._key and not OWN_NAMES.fullmatch(host):
            raise Refusal(421, "without a key this service goes by localhost only (header Host)", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Refusal(403, "pages of other origins may not call this service", code="wrong_origin")
        if scope["path"] not in self._open_to_all and not self._has_key(headers.get("authorization", "")):
            refusal = Refusal(401, "the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")
            if scope["path"] == PAGE:
                refusal.challenge = BASIC
            raise refusal
        if int(headers.get("content-length", "0")) > MAX_DISCARDED_BYTES:
            raise TOO_LONG
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise Refusal(415, "the body must be application/json (header Content-Type)")

    def _has_key(self, header: str) -> bool:
        return not self._key or hmac.compare_digest(_digest(_credential(header)), self._key)


async def _body(receive: Receive) -> bytes:
    """Raises Refusal for one that is too long or too slow."""
    body, length = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                event = await receive()
                part = event.get("body", b"")
                length += len(part)
                if length <= MAX_BODY_BYTES:
                    body += part
                if event["type"] == "http.disconnect" or not event.get("more_body"):
                    break
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
    if length > MAX_BODY_BYTES:
        raise TOO_LONG
    return bytes(body)


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
