"""One request of a load test, and how its answer arrives: the client side of OpenAI's streams and of `/v1/predict`.

Invariants
* A server may be anything: what it sends is bounded in bytes, tokens and time, is never unpacked, and whatever is wrong
  with it becomes a kind of error, one word of a fixed list (`KINDS`, or `status N`), with a short example.
* A moment is read as soon as the event loop has the bytes: pieces of text that come in one packet have the same.
* No redirect is followed and no proxy is used: the key goes to the address that was typed and nowhere else.
"""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from cuadrilla.errors import EnvironmentProblem
from cuadrilla.serve.load_asks import LoadAsk
from cuadrilla.serve.load_stats import LoadReply

try:
    import aiohttp
except ImportError as missing:
    raise EnvironmentProblem(
        "`cuadrilla load` needs aiohttp, which is not installed", hint='pip install "cuadrilla[serve]"'
    ) from missing

COMPLETIONS, CHAT, PREDICT = "completions", "chat", "predict"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions", PREDICT: "/v1/predict"}
CONNECTION, TIME_OUT, BROKEN, MALFORMED = "connection", "time-out", "broken stream", "malformed answer"
TOO_LARGE, NO_END, NOT_STREAMED = "answer too large", "more text than asked for", "not a stream"
SAID_ERROR, FINISHED_WRONG = "error in the stream", "finish_reason error"
KINDS = (
    CONNECTION, TIME_OUT, BROKEN, MALFORMED, TOO_LARGE, NO_END, NOT_STREAMED, SAID_ERROR, FINISHED_WRONG, "not sent",
)  # fmt: skip
CERTIFICATE = "certificate"
"""Of the first call only."""
MOST_EVENT_BYTES = 2**20
MOST_ANSWER_BYTES = 16 * 2**20
MOST_ERROR_BYTES = 64 * 1024
MOST_LISTING_BYTES = 2**20
EXAMPLE_CHARACTERS = 300
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 3.0
"""A free connection is not used again after this: servers close theirs after 5 s (uvicorn) and more, and a request that
crosses the close would be an error that is nobody's."""
FAREWELL_SECONDS = 1.0
TOKENS_SLACK = 64
"""Pieces of text beyond the tokens that were allowed: some servers send a letter of several bytes in parts."""
DONE = b"[DONE]"


class BadAnswerError(Exception):
    """An answer that cannot be used. `kind`: one of `KINDS`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


# -- what is in a stream -----------------------------------------------------------------------------------------------


class EventReader:
    """Bytes of server-sent events in, the data of each whole event out; holds at most `MOST_EVENT_BYTES`."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises BadAnswerError for an event that is too long."""
        data = self._left + data
        if b"\r" in data:
            held = data.endswith(b"\r")  # its line feed may be in the next packet
            data = data[: -1 if held else None].replace(b"\r\n", b"\n") + b"\r" * held
        *events, self._left = data.split(b"\n\n")
        if len(self._left) > MOST_EVENT_BYTES:
            raise BadAnswerError(TOO_LARGE)
        return [payload for event in events if (payload := _payload(event)) is not None]


def _payload(event: bytes) -> bytes | None:
    """None of a comment, or of an event without data."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


@dataclass(slots=True)
class StreamEvent:
    """What one event says. `has_text`: it is a piece of the answer."""

    has_text: bool = False
    finish: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None


def read_event(payload: bytes) -> StreamEvent:
    """Raises BadAnswerError."""
    try:
        value = json.loads(payload.decode("utf-8"))
    except (ValueError, RecursionError):
        raise BadAnswerError(MALFORMED, _example(payload)) from None
    if not isinstance(value, dict):
        raise BadAnswerError(MALFORMED, _example(payload))
    if value.get("error"):
        raise BadAnswerError(SAID_ERROR, said_in(payload))
    event = StreamEvent()
    if isinstance(usage := value.get("usage"), dict):
        event.prompt_tokens, event.tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    choices = value.get("choices")
    if not isinstance(choices, list):
        raise BadAnswerError(MALFORMED, _example(payload))
    if choices and isinstance(choice := choices[0], dict):
        delta = choice.get("delta")
        event.has_text = bool(choice.get("text") or (isinstance(delta, dict) and _text_of(delta)))
        finish = choice.get("finish_reason")
        event.finish = finish[:40] if isinstance(finish, str) else ""
    return event


def _text_of(delta: dict[str, Any]) -> bool:
    """Thoughts are tokens, too."""
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9 else None


def said_in(body: bytes) -> str:
    """The message of an error in OpenAI's form, else the beginning of the text."""
    try:
        value = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        return _example(body)
    for name in ("error", "detail", "message"):
        said = value.get(name) if isinstance(value, dict) else None
        if isinstance(said, dict):
            said = said.get("message")
        if said:
            return str(said)[:EXAMPLE_CHARACTERS]
    return _example(body)


def _example(body: bytes) -> str:
    return body[:EXAMPLE_CHARACTERS].decode("utf-8", errors="replace")


# -- one request -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """A server, without a slash at the end, and what is asked of it."""

    url: str
    api: str = COMPLETIONS
    key: str = ""
    timeout_seconds: float = 120.0


class LoadClient:
    """Sends requests, each on a connection of its own while it lasts."""

    def __init__(self, target: LoadTarget) -> None:
        self.target = target
        self._address = target.url + PATHS[target.api]

    async def __aenter__(self) -> "LoadClient":
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.target.key:
            headers["Authorization"] = f"Bearer {self.target.key}"
        limits = aiohttp.ClientTimeout(total=self.target.timeout_seconds, sock_connect=CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            headers=headers, timeout=limits, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
        )  # fmt: skip
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body, of which the rest is left when it is long. Raises BadAnswerError."""
        limit = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        try:
            async with self._session.get(self.target.url + path, allow_redirects=False, timeout=limit) as response:
                return response.status, await _read_at_most(response, MOST_LISTING_BYTES)
        except TimeoutError:
            raise BadAnswerError(TIME_OUT) from None
        except aiohttp.ClientSSLError as error:
            raise BadAnswerError(CERTIFICATE, str(error.os_error)[:EXAMPLE_CHARACTERS]) from None
        except aiohttp.ClientResponseError as error:
            raise BadAnswerError(MALFORMED, error.message) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise BadAnswerError(CONNECTION, reason_of(error)) from None

    async def send(
        self, ask: LoadAsk, *, clock: Callable[[], float], scheduled: float, inside: Callable[[float], bool]
    ) -> LoadReply:
        """`scheduled`: when it was due. `inside`: whether a moment is in the window. Whatever happens is a reply."""
        sent = clock()
        reply = LoadReply(scheduled=scheduled, sent=sent)
        begun = False
        try:
            async with self._session.post(self._address, data=ask.body, allow_redirects=False) as response:
                begun = True
                if response.status != 200:
                    reply.detail = said_in(await _read_at_most(response, MOST_ERROR_BYTES))
                    reply.problem = f"status {response.status}"
                elif self.target.api == PREDICT:
                    await _read_prediction(response)
                    reply.ended = clock()
                else:
                    await _read_stream(response, ask, reply, clock=clock, inside=inside)
        except BadAnswerError as error:
            reply.problem, reply.detail = error.kind, error.detail
        except TimeoutError:
            reply.problem = TIME_OUT
        except aiohttp.ClientResponseError as error:
            reply.problem, reply.detail = MALFORMED, error.message[:EXAMPLE_CHARACTERS]
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reply.problem, reply.detail = (BROKEN if begun else CONNECTION), reason_of(error)
        reply.ended = reply.ended or clock()
        return reply


def reason_of(error: Exception) -> str:
    """As the system names it, where the library would add its own words."""
    found = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if not isinstance(found, OSError) or not found.errno:
        return str(error)[:EXAMPLE_CHARACTERS]
    return os.strerror(found.errno) if found.errno > 0 else str(found.strerror)


async def _read_at_most(response: aiohttp.ClientResponse, most: int) -> bytes:
    body = b""
    while len(body) < most and (piece := await response.content.read(most - len(body))):
        body += piece
    return body


async def _read_prediction(response: aiohttp.ClientResponse) -> None:
    body = await _read_at_most(response, MOST_ANSWER_BYTES + 1)
    if len(body) > MOST_ANSWER_BYTES:
        raise BadAnswerError(TOO_LARGE)
    try:
        json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise BadAnswerError(MALFORMED, _example(body)) from None


async def _read_stream(
    response: aiohttp.ClientResponse,
    ask: LoadAsk,
    reply: LoadReply,
    *,
    clock: Callable[[], float],
    inside: Callable[[float], bool],
) -> None:
    """Fills in `reply`. Raises BadAnswerError, and what aiohttp raises."""
    if response.content_type != "text/event-stream":
        raise BadAnswerError(NOT_STREAMED, _example(await _read_at_most(response, MOST_ERROR_BYTES)))
    events, is_done, size = EventReader(), False, 0
    reply.gaps = gaps = list[float]()
    while not is_done and (data := await response.content.readany()):
        now = clock()
        if (size := size + len(data)) > MOST_ANSWER_BYTES:
            raise BadAnswerError(TOO_LARGE)
        for payload in events.feed(data):
            if payload == DONE:
                is_done = True
                break
            if not _take(read_event(payload), reply, now=now):
                continue
            if reply.chunks > 1:
                gaps.append(now - reply.last)
            reply.last = now
            reply.chunks_inside += inside(now)
        if reply.chunks > ask.most_tokens + TOKENS_SLACK:
            raise BadAnswerError(NO_END)
    reply.ended = clock()
    _conclude(reply, is_done=is_done)
    if is_done and not response.content.at_eof():
        await _let_end(response)


def _take(event: StreamEvent, reply: LoadReply, *, now: float) -> bool:
    """Whether it was a piece of text."""
    if event.tokens is not None:
        reply.tokens, reply.by_usage = event.tokens, True
    if event.prompt_tokens is not None:
        reply.prompt_tokens = event.prompt_tokens
    reply.finish = event.finish or reply.finish
    if event.has_text:
        reply.first = now if reply.first is None else reply.first
        reply.chunks += 1
    return event.has_text


def _conclude(reply: LoadReply, *, is_done: bool) -> None:
    if not reply.by_usage:
        reply.tokens = reply.chunks
    if reply.finish == "error":
        raise BadAnswerError(FINISHED_WRONG)
    if not is_done and not reply.finish:
        raise BadAnswerError(BROKEN)


async def _let_end(response: aiohttp.ClientResponse) -> None:
    """The last bytes of a stream, after which the connection can be used again; who does not send them loses it."""
    try:
        async with asyncio.timeout(FAREWELL_SECONDS):
            await response.content.readany()
    except TimeoutError:
        response.close()
