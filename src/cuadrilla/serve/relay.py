"""A request on its way through a gateway: to a replica and, if need be, to another one, and the answer back.

Invariants
* A request is asked again of another replica only as long as the caller has not received the first byte of an answer;
  of each replica it is asked once.
* A stream is handed on event by event, each when it is whole, and is never cut off without a word: a replica that
  breaks after its first event leaves an event with an error as the last one.
* When the caller leaves, the connection to the replica is closed at once, and with it what the replica does for it.
* What goes to a replica is the body, its type and whether a stream is wanted: no key of a caller, no other header.
"""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp

from cuadrilla.messages import Message
from cuadrilla.serve.edge import SHOULD_RETRY, Receive, Refusal, Scope, Send, timed_out
from cuadrilla.serve.gateway_metrics import GatewayMetrics
from cuadrilla.serve.replicas import (
    Errand,
    GatewayReplica,
    Status,
    answered,
    begin,
    choose,
    end,
    lose,
    progress,
    work_of,
)

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/predict")
POST_PATHS = (*GENERATING, "/tokenize", "/detokenize")
GET_PATHS = ("/v1/models", "/v1/predict", "/tokenizer_info")
FROM_GATEWAY = "X-Cuadrilla-Gateway"
MOST_GATEWAYS = 4
"""In a row."""
CONNECT_SECONDS = 3.0
USUAL_MOST_SECONDS = 600.0
"""Of a whole call. A replica that is found dead before the first part of its answer is given up at once."""
NEXT_SECONDS = 60.0
"""Between two parts of an answer."""
MOST_ANSWER_BYTES = 64 * 2**20
MOST_EVENT_BYTES = 2**20
LONGEST_WAIT_SECONDS = 60.0
STREAM_TYPE, JSON_TYPE = "text/event-stream", "application/json"
DONE = b"data: [DONE]"
HOP = FROM_GATEWAY.lower().encode()
HOPS = re.compile(r"[0-9a-z]{1,64}(,[0-9a-z]{1,64}){0,7}")
FAILURES = (aiohttp.ClientError, OSError)
MISCONFIGURED = (401, 403, 421)
"""A replica says so to a gateway only: the caller has shown a key and a name to the gateway."""


class Line:
    """A replica, and who waits for news of it."""

    def __init__(self, replica: GatewayReplica) -> None:
        self.replica = replica
        self.told: Status = "unknown"
        """What the log has last said of it."""
        self.doubted = asyncio.Event()
        """Something has failed: it should be looked at now."""
        self._waiting: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """TimeoutError as soon as the replica is given up."""
        async with asyncio.timeout(None) as limit:
            self._waiting.add(limit)
            try:
                yield
            finally:
                self._waiting.discard(limit)

    def give_up(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(now)


class _Another(Exception):
    """This replica has not begun to answer. `wait_seconds`: it is full, and says when to come again."""

    def __init__(self, reason: str, *, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.wait_seconds = reason, wait_seconds


class _Broken(Exception):
    """The replica has begun to answer, and does not go on."""


@dataclass(kw_only=True)
class _Call:
    """A caller's request. `begun`: the caller has received the first part of an answer. `gone`: the caller has left."""

    method: str
    path: str
    target: str
    """The path with its query."""
    body: bytes
    work: int
    hops: str
    send: Send
    begun: bool = False
    gone: bool = False
    is_stream: bool = False


@dataclass(kw_only=True)
class _Try:
    """One replica that a call is asked of."""

    line: Line
    errand: Errand
    first_at: float = field(default=0.0)


class Relay:
    """The ASGI application of what goes to a replica. `number`: the gateway's. `most_seconds`: of a call."""

    def __init__(
        self, lines: Sequence[Line], *, metrics: GatewayMetrics, number: str, most_seconds: float = USUAL_MOST_SECONDS
    ) -> None:
        self._lines = {line.replica: line for line in lines}
        self._replicas = [line.replica for line in lines]
        self._metrics = metrics
        self._number = number
        self._most_seconds = most_seconds
        self._session: aiohttp.ClientSession
        self._is_draining: Callable[[], bool] = bool

    def open(self, session: aiohttp.ClientSession, *, is_draining: Callable[[], bool]) -> None:
        self._session, self._is_draining = session, is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        said = next((value.decode("latin-1") for name, value in scope["headers"] if name == HOP), "")
        hops = said if HOPS.fullmatch(said) else ""  # from a gateway; anything else is some caller's
        work = work_of(json.loads(body)) if body else 1
        path, query = scope["path"], scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        call = _Call(method=scope["method"], path=path, target=target, body=body, work=work, hops=hops, send=send)
        await self._until_gone(call, receive)

    async def _until_gone(self, call: _Call, receive: Receive) -> None:
        answer = asyncio.create_task(self._answer(call))
        gone = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            call.gone = not answer.done()
        finally:
            answer.cancel()
            gone.cancel()
            results = await asyncio.gather(answer, gone, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):  # TimeoutError: reads too slowly
            raise results[0]

    async def _answer(self, call: _Call) -> None:
        try:
            async with asyncio.timeout(self._most_seconds):
                await self._ask_around(call)
        except Refusal as refusal:
            await _refuse(call, refusal)
        except TimeoutError:
            told = timed_out(self._most_seconds)
            await (_break_off(call, told.message, code=None) if call.begun else _refuse(call, told))
        except _Broken as broken:
            await _break_off(call, str(broken))
        except asyncio.CancelledError:
            if call.begun and not call.gone:
                await _break_off(call, "the gateway is stopping")
            raise

    async def _ask_around(self, call: _Call) -> None:
        """Raises Refusal when no replica answers, _Broken when one has stopped in the middle of its answer."""
        if self._is_draining():
            raise Refusal(503, "the gateway is stopping", code="draining", wait_seconds=1)
        hops = call.hops.split(",") if call.hops else []
        if self._number in hops or len(hops) >= MOST_GATEWAYS:
            raise Refusal(508, "gateways lead in a circle", code="loop")
        tried: list[GatewayReplica] = []
        failures: list[_Another] = []
        while replica := choose(self._replicas, now=monotonic(), tried=tried):
            tried.append(replica)
            try:
                await self._ask(call, self._lines[replica])
                return
            except _Another as another:
                failures.append(another)
                self._metrics.retries.labels(replica.name, another.reason).inc()
        raise _no_answer(failures)

    async def _ask(self, call: _Call, line: Line) -> None:
        """Raises _Another before the caller has received anything, _Broken afterwards."""
        replica = line.replica
        with self._counted(call, line) as current:
            try:
                async with line.patience():
                    response = await self._send(call, replica)
            except FAILURES as error:
                raise _Another("unreachable" if self._doubted(line, error) else "no answer") from None
            try:
                _judge(response, line)
                if response.content_type == STREAM_TYPE and response.status == 200:
                    await self._hand_on_events(call, current, response)
                else:
                    await self._hand_on_whole(call, current, response)
            finally:
                if not response.content.at_eof():
                    response.close()  # the replica notices, and stops
                response.release()

    async def _send(self, call: _Call, replica: GatewayReplica) -> aiohttp.ClientResponse:
        headers = {"Content-Type": JSON_TYPE} if call.method == "POST" else {}
        if call.hops:
            headers[FROM_GATEWAY] = f"{call.hops},{self._number}"
        return await self._session.request(
            call.method,
            replica.url + call.target,
            data=call.body if call.method == "POST" else None,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )

    @contextmanager
    def _counted(self, call: _Call, line: Line) -> Iterator[_Try]:
        replica = line.replica
        current = _Try(line=line, errand=begin(replica, among=self._replicas, work=call.work, now=monotonic()))
        outcome = "broken"
        try:
            yield current
            outcome = "answered"
        except _Another:
            outcome = "refused"
            raise
        except asyncio.CancelledError:
            outcome = "left"
            raise
        finally:
            now = monotonic()
            if outcome == "refused":
                current.errand.tokens = 0  # says nothing of how fast it is
            self._metrics.tokens.labels(replica.name).inc(current.errand.tokens)
            end(current.errand, now=now)
            self._metrics.requests.labels(replica.name, outcome).inc()
            self._metrics.seconds.labels(replica.name).observe(now - current.errand.began)

    def _doubted(self, line: Line, error: Exception) -> bool:
        """Whether a request has found it dead, and not only waited in vain: it is left out, and looked at now."""
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            return False
        reason = Message("a request to it has failed: {kind}", kind=type(error).__name__)
        lose(line.replica, reason, now=monotonic())
        line.doubted.set()
        return True

    def _arrived(self, current: _Try, tokens: int) -> None:
        now = monotonic()
        if not current.first_at:
            current.first_at = now
            self._metrics.first_seconds.labels(current.line.replica.name).observe(now - current.errand.began)
        progress(current.errand, tokens=tokens, now=now)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _hand_on_whole(self, call: _Call, current: _Try, response: aiohttp.ClientResponse) -> None:
        """An answer that is no stream is complete before the caller receives any of it."""
        body = bytearray()
        async for part in self._parts(current, response):
            body += part
            if len(body) > MOST_ANSWER_BYTES:
                raise Refusal(502, "the answer of a replica is too long", code="bad_replica")
        generates = call.path in GENERATING and response.status == 200
        self._arrived(current, _tokens_in(bytes(body)) if generates else 0)
        headers = {"Content-Type": response.headers.get("Content-Type", JSON_TYPE), "Content-Length": str(len(body))}
        if _is_final(response):
            headers[SHOULD_RETRY] = "false"
        await _begin(call, response.status, headers)
        await call.send({"type": "http.response.body", "body": bytes(body)})

    async def _hand_on_events(self, call: _Call, current: _Try, response: aiohttp.ClientResponse) -> None:
        pending, last = bytearray(), b""
        async for part in self._parts(current, response):
            pending += part
            whole = whole_events(pending)
            if not whole:
                continue
            del pending[: len(whole)]
            last = whole
            self._arrived(current, (b"\n" + whole).count(b"\ndata:"))
            if not call.begun:
                call.is_stream = True
                await _begin(call, 200, {"Content-Type": f"{STREAM_TYPE}; charset=utf-8", "Cache-Control": "no-store"})
            await call.send({"type": "http.response.body", "body": whole, "more_body": True})
        if not call.begun:
            raise _Another("empty")
        if not last.rstrip().endswith(DONE):
            raise _Broken("the stream of a replica has ended before its end")
        await call.send({"type": "http.response.body", "body": b""})

    async def _parts(self, current: _Try, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Of an answer, as they come. Raises _Another, or _Broken once the caller has received something."""
        line = current.line
        while True:
            had_any = current.first_at > 0
            try:
                if had_any:
                    async with asyncio.timeout(NEXT_SECONDS):
                        part = await response.content.readany()
                else:
                    async with line.patience():
                        part = await response.content.readany()
            except FAILURES as error:
                broke = self._doubted(line, error)
                if not had_any:
                    raise _Another("broke off" if broke else "no answer") from None
                raise _Broken("a replica has broken off" if broke else "a replica has fallen silent") from None
            if not part:
                return
            yield part


def whole_events(pending: bytes | bytearray) -> bytes:
    """The events at its beginning that are complete; all of it, if one is longer than any should be."""
    found = [end + len(blank) for blank in (b"\n\n", b"\r\n\r\n") if (end := pending.rfind(blank)) >= 0]
    if not found and len(pending) > MOST_EVENT_BYTES:
        return bytes(pending)
    return bytes(pending[: max(found, default=0)])


def _judge(response: aiohttp.ClientResponse, line: Line) -> None:
    """Raises _Another for an answer that another replica may give better."""
    status, now = response.status, monotonic()
    wait = _wait_seconds(response.headers.get("Retry-After", ""))
    if _is_final(response):
        answered(line.replica, status=200, wait_seconds=0.0, now=now)
        return
    answered(line.replica, status=status, wait_seconds=wait, now=now)
    if line.replica.status == "down":
        line.doubted.set()
    if status in (429, 503):
        raise _Another("full", wait_seconds=wait)
    if status in MISCONFIGURED or 300 <= status < 400:
        lose(line.replica, Message("it refuses the gateway (HTTP {status})", status=status), now=now)
        line.doubted.set()
        raise _Another("refused")
    if status >= 500:
        raise _Another("error")


def _is_final(response: aiohttp.ClientResponse) -> bool:
    """A refusal that no other replica would better: the request takes longer than any may."""
    return response.status == 503 and response.headers.get(SHOULD_RETRY) == "false"


def _wait_seconds(text: str) -> float:
    return min(LONGEST_WAIT_SECONDS, float(text)) if text.isascii() and text.isdecimal() and len(text) < 6 else 1.0


def _tokens_in(body: bytes) -> int:
    """What an answer says that it cost; 1 for one that says nothing."""
    try:
        usage: Any = json.loads(body)["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 1
    return max(1, usage) if isinstance(usage, int) else 1


def _no_answer(failures: Sequence[_Another]) -> Refusal:
    waits = [failure.wait_seconds for failure in failures if failure.wait_seconds]
    if waits:
        return Refusal(503, "all replicas are busy", code="overloaded", wait_seconds=math.ceil(min(waits)))
    if any(failure.reason == "error" for failure in failures):
        return Refusal(502, "the replicas have answered this request with an error", code="bad_replica")
    return Refusal(503, "no replica is ready", code="no_replica", wait_seconds=1)


async def _left(receive: Receive) -> None:
    """Returns when the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(call: _Call, status: int, headers: dict[str, str]) -> None:
    raw = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    call.begun = True
    await call.send({"type": "http.response.start", "status": status, "headers": raw})


async def _refuse(call: _Call, refusal: Refusal) -> None:
    content = json.dumps(refusal.body).encode()
    await _begin(
        call, refusal.status, {"Content-Type": JSON_TYPE, "Content-Length": str(len(content))} | refusal.headers
    )
    await call.send({"type": "http.response.body", "body": content})


async def _break_off(call: _Call, reason: str, *, code: str | None = "replica_lost") -> None:
    """The last event of a stream that has no end; an answer that is no stream is cut, which its length tells."""
    if call.is_stream:
        event = b"data: " + json.dumps(Refusal(502, reason, code=code).body).encode() + b"\n\n"
        await call.send({"type": "http.response.body", "body": event})
