"""ASGI middleware that checks every call to a service first: who calls, from which page, how large the body is.

Invariants
* If there is a key, every route except those in `open_to_all` requires it: as a bearer token, or as the password of
  basic authentication, with which a browser can open the page. It is compared in constant time.
* Without a key, the header Host must name this machine (against DNS rebinding). A page of another origin may call only
  if the service allows it, and with the key as a bearer token, which no browser adds by itself.
* A body has at most `MAX_BODY_BYTES`.
* A refusal is an error in the form of OpenAI's API.
"""

import base64
import binascii
import hmac
import re
from collections.abc import Collection, Mapping

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_TO_ALL, PAGE = ("/health", "/healthz"), "/"
BASIC = 'Basic realm="cuadrilla", charset="UTF-8"'
"""The only scheme in its header: Chromium reads just one, and does not ask its user if another one comes first."""
MAX_BODY_BYTES = 8 * 2**20
OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(HTTPException):
    """An error response in the form of OpenAI's API. `param`: the field of the request that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(status, message, {name.replace("_", "-"): value for name, value in headers.items()})
        self.param, self.code = param, code

    def response(self) -> Response:
        kind = "server_error" if self.status_code >= 500 else KINDS.get(self.status_code, "invalid_request_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status_code, self.headers)


class Edge:
    """`app` behind these checks. The key "" means that none is required: only for a port that no other machine reaches.
    `open_to_all`: routes that reveal nothing and require no key. `pages`: pages of other origins may call with the key.
    """

    def __init__(
        self, app: ASGIApp, *, key: str, open_to_all: Collection[str] = OPEN_TO_ALL, pages: bool = False
    ) -> None:
        self._app, self._key, self._open_to_all, self._pages = app, key, open_to_all, pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1").strip() for name, value in scope["headers"]}
            try:
                self._check(scope["path"], headers)
            except Refusal as refusal:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, _limited(receive), send)

    def _check(self, path: str, headers: Mapping[str, str]) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._key and not OWN_NAMES.fullmatch(host):
            template = (
                "without a key (--api-key-file) this service answers only as localhost; Host names another machine"
            )
            raise Refusal(421, template, code="wrong_host")
        shown = headers.get("authorization", "")
        is_other = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if is_other and not (self._pages and self._key and shown.lower().startswith("bearer ")):
            template = (
                "a page of another origin needs a service with a key (--api-key-file), and sends it as a bearer token"
            )
            raise Refusal(403, template, code="wrong_origin")
        if path not in self._open_to_all and not self._has_key(shown):
            template = "the key is missing or wrong: Authorization: Bearer KEY"
            # "Basic" makes a browser ask its user: right for the page, wrong for the requests that the page sends.
            raise Refusal(401, template, code="invalid_api_key", WWW_Authenticate=BASIC if path == PAGE else "Bearer")

    def _has_key(self, header: str) -> bool:
        return not self._key or hmac.compare_digest(_credential(header).encode(), self._key.encode())


def _credential(header: str) -> str:
    """The key in a header `Authorization`; "" if it has none."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return value.strip() if scheme.lower() == "bearer" else ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _limited(receive: Receive) -> Receive:
    """`receive`, which then raises Refusal for a body that is too long."""
    length = 0

    async def received() -> Message:
        nonlocal length
        event = await receive()
        length += len(event.get("body", b""))
        if length > MAX_BODY_BYTES:
            raise Refusal(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes", code="too_large")
        return event

    return received
