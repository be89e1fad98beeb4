"""One address for several services of one model: which ones are alive, and what the gateway says of itself.

Each replica is asked once a second how it is (`/readyz`); what its requests meet counts at once. `serve/replicas.py`
decides, `serve/relay.py` carries the requests, and `serve/edge.py` is in front of it all.

Invariants
* Callers show the gateway's key, replicas see another one; neither is logged, and a caller's is not handed on.
* Every replica that takes requests serves the model of the first one that was ready, as long as the gateway lives.
* A gateway never calls itself: each one has a number, which it gives along and finds again.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cuadrilla.errors import ConfigError
from cuadrilla.link.address import Address
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.serve.edge import Application, Refusal
from cuadrilla.serve.gateway_metrics import GatewayMetrics
from cuadrilla.serve.listen import TURNED_AWAY
from cuadrilla.serve.page import page
from cuadrilla.serve.relay import FROM_GATEWAY, GET_PATHS, POST_PATHS, USUAL_MOST_SECONDS, Line, Relay
from cuadrilla.serve.replicas import (
    GatewayReplica,
    Readiness,
    hear,
    lose,
    miss,
    move,
    parse_models,
    parse_readiness,
    shared_models,
    speeds,
)

CHECK_LIMIT_SECONDS = 2.0
MOST_READY_BYTES = 64 * 1024
FIND_SECONDS = 1.0
IDLE_SECONDS = 3.0
"""A connection to a replica is used again within this time; services keep theirs open for longer."""
OWN_PATHS = ("/", "/healthz", "/readyz", "/metrics")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Find = Callable[[], Sequence[str]]

log = logging.getLogger(__name__)


class Gateway:
    """The replicas and what watches over them. Make it, then serve `app()`; `drain` may be called by a signal.

    `find`: where the replicas are now, in the order of `urls`, for those that may move; called in another thread.
    `most_seconds`: of one call.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        replica_key: str = "",
        find: Find | None = None,
        most_seconds: float = USUAL_MOST_SECONDS,
    ) -> None:
        self._number = secrets.token_hex(8)
        self._model = ""
        self._key = replica_key
        self._draining = False
        self._find = find
        self._most_seconds = most_seconds
        self._lines = [Line(GatewayReplica(url=url)) for url in urls]
        self._replicas = [line.replica for line in self._lines]
        self._metrics = GatewayMetrics(self._replicas, routes=(*OWN_PATHS, *GET_PATHS, *POST_PATHS))

    def app(self) -> Starlette:
        relay = Relay(self._lines, metrics=self._metrics, number=self._number, most_seconds=self._most_seconds)
        return Starlette(
            routes=[
                Route("/", self._page, methods=["GET"]),
                Route("/healthz", _alive, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                Route("/metrics", self._measured, methods=["GET"]),
                *(Route(path, relay, methods=["GET"]) for path in GET_PATHS),
                *(Route(path, relay, methods=["POST"]) for path in POST_PATHS),
            ],
            exception_handlers={HTTPException: _refused},
            lifespan=lambda _app: self._living(relay),
        )

    def counting(self, app: Application) -> Application:
        """`app` with each of its calls counted and logged."""
        return self._metrics.calls.counting(app)

    def drain(self) -> None:
        """No new requests; those at hand go on."""
        self._draining = True

    @asynccontextmanager
    async def _living(self, relay: Relay) -> AsyncIterator[None]:
        headers = {FROM_GATEWAY: self._number} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        async with aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            trust_env=False,
        ) as session:
            relay.open(session, is_draining=lambda: self._draining)
            found = await asyncio.gather(*(self._look(line.replica, session) for line in self._lines))
            for line, said in zip(self._lines, found, strict=True):  # the first one that is ready names the model
                self._take(line, said)
            watching = [asyncio.create_task(self._watch(line, session)) for line in self._lines]
            if self._find:
                watching.append(asyncio.create_task(self._follow(self._find)))
            try:
                yield
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.gather(*watching, return_exceptions=True)

    # -- health --------------------------------------------------------------------------------------------------------

    async def _watch(self, line: Line, session: aiohttp.ClientSession) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, line.replica.check_at - monotonic())):
                    await line.doubted.wait()
            line.doubted.clear()
            self._take(line, await self._look(line.replica, session))

    async def _follow(self, find: Find) -> None:
        while True:
            await asyncio.sleep(FIND_SECONDS)
            if all(replica.status == "ready" for replica in self._replicas):
                continue
            for line, url in zip(self._lines, await asyncio.to_thread(find), strict=True):
                if url and url != line.replica.url:
                    move(line.replica, url, now=monotonic())
                    line.give_up()
                    line.doubted.set()

    async def _look(self, replica: GatewayReplica, session: aiohttp.ClientSession) -> "Readiness | str | float":
        """What a replica says of itself; why it is dead; or when it was asked, if it has not answered."""
        asked_at = monotonic()
        try:
            async with asyncio.timeout(CHECK_LIMIT_SECONDS):
                return await _readiness(session, replica.url, was_ready=replica.status == "ready")
        except TimeoutError:
            return asked_at
        except (aiohttp.ClientError, OSError) as error:
            return Message("it cannot be reached: {reason}", reason=_reason(error))
        except ValueError as error:
            reason: str = error.args[0]
            return reason

    def _take(self, line: Line, found: "Readiness | str | float") -> None:
        replica, now = line.replica, monotonic()
        match found:
            case Readiness():
                hear(replica, found, among=self._replicas, gateway=self._number, model=self._model, now=now)
            case str():
                lose(replica, found, now=now, checked=True)
            case float():
                miss(replica, asked_at=found, now=now)
        if replica.status == "ready":
            self._model = self._model or replica.model
        if replica.status == "down":
            line.give_up()
        if replica.status != line.told:
            line.told = replica.status
            self._tell(replica)

    def _tell(self, replica: GatewayReplica) -> None:
        if replica.status == "ready":
            log.info("%s is ready: %s", replica.name, replica.model or Message("it names no model"), extra=TALK)
        else:
            log.warning("%s gets no requests: %s", replica.name, replica.reason)

    # -- what the gateway says of itself -------------------------------------------------------------------------------

    async def _ready(self, _request: Request) -> Response:
        speed = speeds(self._replicas)
        ready = [replica for replica in self._replicas if replica.status == "ready"]
        status = "draining" if self._draining else "ready" if ready else "loading"
        said = {
            "status": status,
            "model": self._model,
            "models": [{"model": name} for name in shared_models(self._replicas)],
            "gateway": self._number,
            "busy": sum(replica.requests for replica in ready),
            "tokens_per_second": round(sum(speed[replica.url] for replica in ready), 2),
            "replicas": [self._described(replica, speed=speed[replica.url]) for replica in self._replicas],
        }
        return JSONResponse(said, 200 if status == "ready" else 503, {} if status == "ready" else {"Retry-After": "1"})

    def _described(self, replica: GatewayReplica, *, speed: float) -> dict[str, Any]:
        return {
            "url": replica.url,
            "status": replica.status,
            "reason": replica.reason,
            "model": replica.model,
            "busy": replica.requests,
            "tokens_per_second": round(speed, 2),
        }

    async def _page(self, request: Request) -> Response:
        """What it asks for comes from the replicas, by way of the gateway."""
        return page(shared_models(self._replicas), languages=request.headers.get("accept-language", ""))

    async def _measured(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type=METRICS_TYPE)


async def _alive(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refused(_request: Request, error: Exception) -> Response:
    """Of Starlette's own: a path that is none, a method that is not the path's."""
    assert isinstance(error, HTTPException)
    refusal = Refusal(error.status_code, "there is nothing at this path, or not by this method")
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


async def _readiness(session: aiohttp.ClientSession, url: str, *, was_ready: bool) -> Readiness:
    """What a service says at `/readyz`; another server, which has no such page, is ready when it lists its models.
    One whose connections are all taken is what it was.

    Raises ValueError with a reason, aiohttp.ClientError, OSError.
    """
    status, said = await _get(session, f"{url}/readyz")
    if status == 404:
        status, said = await _get(session, f"{url}/v1/models")
        if status == 200 and isinstance(said, dict) and isinstance(models := said.get("data"), list):
            names = parse_models(models, key="id")
            return Readiness(status="ready", model=next(iter(names), ""), models=names)
    if status in (401, 403):
        raise ValueError(Message("it refuses the key that it is shown: name another with --replica-key-file"))
    if status == 421:
        raise ValueError(Message("it does not go by the name in this URL"))
    if status == 503 and isinstance(said, dict) and said.get("error") == TURNED_AWAY.body["error"]:
        return Readiness(status="ready" if was_ready else "loading")
    if status not in (200, 503):
        raise ValueError(Message("what answers there is no such service (HTTP {status})", status=status))
    return parse_readiness(status, said)


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    """Status and JSON; None where it is none."""
    async with session.get(url, allow_redirects=False) as response:
        raw = await response.content.read(MOST_READY_BYTES)
        while len(raw) < MOST_READY_BYTES and (more := await response.content.read(MOST_READY_BYTES)):
            raw += more
        try:
            return response.status, json.loads(raw)
        except (ValueError, RecursionError):
            return response.status, None


def _reason(error: Exception) -> str:
    """In few words, without the address, which is said beside it."""
    if isinstance(error, aiohttp.ClientSSLError):  # whose number is none of the system's
        return Message("its certificate is not one that this machine trusts (SSL_CERT_FILE names those that it does)")
    number = getattr(getattr(error, "os_error", error), "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else type(error).__name__


def refuse_itself(urls: Iterable[str], *, address: Address) -> None:
    """Raises ConfigError for the URL of the gateway itself; a URL that leads there by another way is found later."""
    own = _addresses(address.host, address.port)
    for url in urls:
        parts = urlsplit(url)
        if parts.port == address.port and own & _addresses(parts.hostname or "", address.port):
            hint = "name the services, or another port for the gateway"
            raise ConfigError("{url} is this gateway itself", url=url, hint=hint)


def _addresses(host: str, port: int) -> set[str]:
    with suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return set()
