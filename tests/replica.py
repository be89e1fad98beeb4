"""An OpenAI-compatible service of another make, which a gateway stands in front of: it says numbers, at its own speed.

    python -m tests.replica PORT [--speed 200] [--slots 4] [--key-file FILE]

`/counts` tells what it has met, without asking for a key.
"""

import argparse
import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from cuadrilla.serve.listen import TURNED_AWAY


@dataclass(kw_only=True)
class State:
    """Settings, some of which make it misbehave, and what it has met. All may be changed while it runs."""

    model: str = "uno"
    speed: float = 200.0
    """Tokens per second of one request."""
    slots: int = 4
    queue: int = 1000
    key: str = ""
    status: str = "ready"
    fails: int = 0
    """The status of HTTP for every completion."""
    hopeless: bool = False
    """And another try would not be answered better, it says."""
    cut_after: int = 0
    """Tokens of a stream, after which the connection is reset."""
    half: bool = False
    """That, in the middle of an event."""
    ends_early: bool = False
    """A stream has no end."""
    has_ready_page: bool = True
    turns_away: bool = False
    """All its connections are taken, it says to whoever comes."""
    frozen: bool = False
    """It accepts, and says nothing."""
    busy: int = 0
    waiting: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    free: asyncio.Semaphore = field(default_factory=asyncio.Semaphore)
    seen: list[dict[str, str]] = field(default_factory=list)
    """The headers of completions."""


STATE = web.AppKey("state", State)


def turned_away(state: State) -> web.Response:
    state.counts["turned away"] += 1
    headers = {"Retry-After": str(TURNED_AWAY.wait_seconds)}
    return web.json_response(TURNED_AWAY.body, status=TURNED_AWAY.status, headers=headers)


async def ready(request: web.Request) -> web.Response:
    state = request.app[STATE]
    if state.turns_away:
        return turned_away(state)
    if state.frozen:
        await asyncio.Event().wait()
    if not allowed(request):
        return web.json_response({}, status=401)
    if not state.has_ready_page:
        return web.json_response({}, status=404)
    said = {
        "status": state.status,
        "model": state.model,
        "slots": state.slots,
        "busy": state.busy,
        "waiting": state.waiting,
        "tokens_per_second": state.speed,
    }
    return web.json_response(said, status=200 if state.status == "ready" else 503)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": request.app[STATE].model, "object": "model"}]})


async def counts(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return web.json_response({**state.counts, "busy": state.busy})


async def complete(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    asked = await request.json()
    state.counts["requests"] += 1
    state.seen.append(dict(request.headers))
    if state.turns_away:
        return turned_away(state)
    if state.frozen:
        await asyncio.Event().wait()
    if not allowed(request):
        return web.json_response({}, status=401)
    if state.fails:
        headers = {"x-should-retry": "false"} if state.hopeless else {"Retry-After": "7"}
        return web.json_response({"error": {"message": "no"}}, status=state.fails, headers=headers)
    if state.waiting >= state.queue:
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "3"})
    state.waiting += 1
    try:
        await state.free.acquire()
    finally:
        state.waiting -= 1
    state.busy += 1
    try:
        return await answer(request, state, asked)
    except (asyncio.CancelledError, ConnectionError):
        state.counts["left"] += 1
        raise
    finally:
        state.busy -= 1
        state.free.release()


async def answer(request: web.Request, state: State, asked: dict[str, Any]) -> web.StreamResponse:
    wanted = asked.get("max_tokens", 16)
    if not asked.get("stream"):
        await asyncio.sleep(wanted / state.speed)
        text = " ".join(map(str, range(wanted)))
        choices = [{"index": 0, "text": text, "finish_reason": "length"}]
        return web.json_response({"choices": choices, "usage": {"completion_tokens": wanted}})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(wanted):
        await asyncio.sleep(1 / state.speed)
        chunk = {"choices": [{"index": 0, "text": f"{number} ", "finish_reason": None}]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if number + 1 == state.cut_after:
            await break_off(request, response, half=state.half)
            return response
    if not state.ends_early:
        await response.write(b"data: [DONE]\n\n")
    state.counts["done"] += 1
    return response


async def break_off(request: web.Request, response: web.StreamResponse, *, half: bool) -> None:
    if half:
        await response.write(b'data: {"choices": [{"ind')
    assert request.transport is not None
    request.transport.abort()


def allowed(request: web.Request) -> bool:
    key = request.app[STATE].key
    return not key or request.headers.get("Authorization") == f"Bearer {key}"


def application(state: State) -> web.Application:
    state.free = asyncio.Semaphore(state.slots)
    app = web.Application()
    app[STATE] = state
    app.router.add_get("/readyz", ready)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/counts", counts)
    app.router.add_post("/v1/completions", complete)
    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--speed", type=float, default=200.0)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--key-file", type=Path)
    given = parser.parse_args()
    key = given.key_file.read_text().strip() if given.key_file else ""
    app = application(State(speed=given.speed, slots=given.slots, key=key))
    web.run_app(app, host="127.0.0.1", port=given.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
