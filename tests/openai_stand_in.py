"""A small server with OpenAI's API that answers as a script says: how long it waits, what it sends, how it fails.

    with stand_in() as server:
        server.script = Script(first=0.05, gap=0.01)
        ... server.url ...

`python -m tests.openai_stand_in --port 8901 --first 0.02 --gap 0.005` serves by itself, for measurements.
"""

import argparse
import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

LONGEST_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Script:
    """Of an answer. `tokens` None: as many as were asked for. `raw`: sent in the place of the stream, then it ends."""

    first: float = 0.0
    gap: float = 0.0
    tokens: int | None = None
    status: int = 200
    finish: str = "length"
    usage: bool = True
    extra_tokens: int = 0
    """The server counts so many more than it sends pieces of text."""
    raw: bytes | None = None
    content_type: str = "text/event-stream"
    cut_after: int | None = None
    """Pieces of text after which the connection breaks."""
    endless: bytes | None = None
    """Sent again and again."""
    hangs: bool = False
    done: bool = True


Choose = Callable[[int], Script]
"""The script of request number 0, 1, 2, ..., not counting trials."""


@dataclass
class StandIn:
    """`script` may be a function of the request's number. `seen`: what was asked, and `keys`: by whom."""

    script: Script | Choose = field(default_factory=Script)
    key: str = ""
    models: Any = field(default_factory=lambda: {"object": "list", "data": [{"id": "stand-in", "object": "model"}]})
    trial: Script | None = field(default_factory=Script)
    """How the client's first request is answered; None: as all others."""
    one_at_a_time: bool = False
    port: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    reached: threading.Event = field(default_factory=threading.Event)
    """Somebody waits for an answer that hangs."""

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()
        self._at_once = self.most_at_once = 0
        self._closing = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._list)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/predict"):
            app.router.add_post(path, self._answer)
        return app

    def close(self) -> None:
        self._closing.set()

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        if isinstance(self.models, int):
            return web.Response(status=self.models)
        if isinstance(self.models, bytes):
            return web.Response(body=self.models)
        return web.json_response(self.models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.seen) - (self.trial is not None)
        self.seen.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        script = self.script(number) if callable(self.script) else self.script
        if self.trial is not None and number < 0:
            script = self.trial
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if not self.one_at_a_time:
                return await self._play(script, request, body)
            async with self._turn:
                return await self._play(script, request, body)
        finally:
            self._at_once -= 1

    async def _play(self, script: Script, request: web.Request, body: Any) -> web.StreamResponse:
        await self._wait(script.first)
        if script.hangs:
            self.reached.set()
            await self._wait(LONGEST_SECONDS)
        if script.status != 200:
            return web.json_response({"error": {"message": f"scripted {script.status}"}}, status=script.status)
        if request.path == "/v1/predict":
            return web.json_response({"outputs": [1]})
        response = web.StreamResponse(headers={"Content-Type": script.content_type})
        await response.prepare(request)
        with suppress(ConnectionError):  # the client has had enough
            await self._send(script, request, response, body)
        return response

    async def _send(self, script: Script, request: web.Request, response: web.StreamResponse, body: Any) -> None:
        if script.raw is not None:
            await response.write(script.raw)
            return
        while script.endless is not None and not self._closing.is_set():
            await response.write(script.endless)
            await asyncio.sleep(0)
        count = body["max_tokens"] if script.tokens is None else script.tokens
        is_chat = request.path.endswith("/chat/completions")
        for number in range(count):
            if number:
                await self._wait(script.gap)
            if number == script.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return
            await response.write(_event(_choice(" uno", is_chat=is_chat)))
        await response.write(_event(_choice("", is_chat=is_chat, finish=script.finish)))
        if script.usage and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": count + script.extra_tokens}
            await response.write(_event({"choices": [], "usage": usage}))
        if script.done:
            await response.write(b"data: [DONE]\n\n")

    async def _wait(self, seconds: float) -> None:
        if seconds:
            try:
                await asyncio.wait_for(self._closing.wait(), seconds)
            except TimeoutError:
                return


def _choice(text: str, *, is_chat: bool, finish: str | None = None) -> dict[str, Any]:
    part = {"delta": {"content": text}} if is_chat else {"text": text, "logprobs": None}
    choice = {"index": 0, **part, "finish_reason": finish}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "stand-in", "choices": [choice]}


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextmanager
def stand_in(**options: Any) -> Iterator[StandIn]:
    """A server in a thread of its own, on a free port of the loopback."""
    loop = asyncio.new_event_loop()
    server = StandIn(**options)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", server.port)
        await site.start()
        server.port = runner.addresses[0][1]

    async def end() -> None:
        server.close()
        await runner.cleanup()

    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--spread", type=float, default=0.0, help="sigma of a lognormal factor on --first")
    parser.add_argument("--one-at-a-time", action="store_true")
    wanted = parser.parse_args()
    dice = random.Random(0)

    def script(_number: int) -> Script:
        return Script(first=wanted.first * dice.lognormvariate(0.0, wanted.spread), gap=wanted.gap)

    async def serve() -> None:
        server = StandIn(script=script, trial=None, one_at_a_time=wanted.one_at_a_time)
        runner = web.AppRunner(server.app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", wanted.port).start()
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
