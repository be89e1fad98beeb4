"""What the dashboard's page asks for. Everything is read from run directories; nothing is written.

* `GET /api/runs`: a row for each run, and what hands out runs: the queue, searches. `GET /api/curves?run=KEY`: the
  curves of one, for a comparison.
* `GET /api/follow?of=KEY`: a stream of events, each what has changed in the run since the one before.
  `GET /api/jobs?of=KEY`: the same of a queue or a search.
* `GET /api/about?run=KEY`: settings, data, versions.
* `GET /metrics`: all runs for Prometheus.

Who may call is the concern of `serve/edge.py`, which stands before it.
"""

import asyncio
import contextlib
import json
from asyncio import AbstractEventLoop, Event
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from cuadrilla.monitor.about import about
from cuadrilla.monitor.prometheus import CONTENT_TYPE, metrics_text
from cuadrilla.monitor.run import RunPlace, RunReader
from cuadrilla.monitor.watch_jobs import JobsPlace
from cuadrilla.monitor.web.page import page_text
from cuadrilla.monitor.web.runs import MAX_OPEN, Runs
from cuadrilla.serve.edge import OPEN_TO_ALL, PAGE
from cuadrilla.serve.page import preferred

WITHOUT_TOKEN = (*OPEN_TO_ALL, PAGE)
"""The page itself tells nothing: it has its token from the part of its address that no server sees."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
POLL_SECONDS = 1.0
MAX_STREAMS = 64
MAX_KEY = 400
P = TypeVar("P")
W = TypeVar("W")


class Watched(Protocol[P]):
    """What grows, and is told piece by piece: a run, a queue, a search."""

    @property
    def is_behind(self) -> bool:
        """More was in the files than one refresh takes in."""

    def news(self, place: P) -> tuple[dict[str, Any], P]:
        """By name, what a reader at this place lacks; and where it is then."""


class Dashboard:
    """`drain`: streams end, so that the process can."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._ends: dict[Event, AbstractEventLoop] = {}
        """One for each stream, which says that it is to end."""
        self._drains = False
        self.app = self._make_app()

    def drain(self) -> None:
        """From any thread, and from a signal's handler."""
        self._drains = True
        for end, loop in list(self._ends.items()):
            loop.call_soon_threadsafe(end.set)

    def _make_app(self) -> FastAPI:
        app = FastAPI(title="cuadrilla", openapi_url=None, docs_url=None, redoc_url=None)
        app.get(PAGE)(self._page)
        for path in OPEN_TO_ALL:
            app.get(path)(self._healthy)
        app.get("/api/runs")(self._runs)
        app.get("/api/curves")(self._curves)
        follow_run, follow_jobs = (
            self._make_stream(self.runs.watched, RunPlace),
            self._make_stream(self.runs.watched_jobs, JobsPlace),
        )
        app.get("/api/follow", response_class=EventSourceResponse)(follow_run)
        app.get("/api/jobs", response_class=EventSourceResponse)(follow_jobs)
        app.get("/api/about")(self._about)
        app.get("/metrics")(self._metrics)
        return app

    async def _page(self, request: Request) -> Response:
        text, policy = page_text(language=preferred(request.headers.get("accept-language", "")), asks="'self'")
        headers = {**HEADERS, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    async def _healthy(self) -> Response:
        return _json({"status": "ok"})

    async def _runs(self) -> Response:
        runs = await asyncio.to_thread(self.runs.summaries)
        return _json({"runs": runs, "queues": await asyncio.to_thread(self.runs.jobs_summaries)})

    async def _curves(self, run: str = "") -> Response:
        watched = await self._watched(run)
        while watched.is_behind:
            await asyncio.to_thread(watched.refresh)
        news, _ = await asyncio.to_thread(watched.news, RunPlace())
        return _json({"run": run, "head": news.get("head"), "figures": news.get("figures")})

    async def _watched(self, run: str = "") -> RunReader:
        """Raises 404."""
        return await _found(self.runs.watched, run)

    def _make_stream(self, find: Callable[[str], Watched[P] | None], begin: Callable[[], P]) -> Any:
        """What follows the run, or the queue, of a key. It raises 404, and 503 where too many do."""

        async def allowed(of: str = "") -> str:
            await _found(find, of)
            if len(self._ends) >= MAX_STREAMS:
                raise HTTPException(503, "too many pages are open")
            return of

        async def follow(key: str = Depends(allowed)) -> AsyncIterator[ServerSentEvent]:
            async for event in self._told(find, key, begin()):
                yield event

        return follow

    async def _told(
        self, find: Callable[[str], Watched[P] | None], key: str, place: P
    ) -> AsyncIterator[ServerSentEvent]:
        """What a page that has nothing yet is told, until it goes."""
        end = Event()
        self._ends[end] = asyncio.get_running_loop()
        try:
            while not (self._drains or end.is_set()):
                watched = await _found(find, key)
                news, place = await asyncio.to_thread(watched.news, place)
                if news:
                    yield ServerSentEvent(raw_data=await asyncio.to_thread(_text, news))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(end.wait(), 0 if watched.is_behind else POLL_SECONDS)
        except HTTPException:  # its folder has gone
            return
        finally:
            del self._ends[end]

    async def _about(self, run: str = "") -> Response:
        watched = await self._watched(run)
        return _json(await asyncio.to_thread(about, watched.run))

    async def _metrics(self) -> Response:
        return Response(await asyncio.to_thread(self._metrics_text), media_type=CONTENT_TYPE)

    def _metrics_text(self) -> bytes:
        watched = ((key, self.runs.watched(key)) for key in self.runs.names()[:MAX_OPEN])
        return metrics_text([(key, run) for key, run in watched if run is not None])


async def _found(find: Callable[[str], W | None], key: str) -> W:
    """Raises 404."""
    watched = await asyncio.to_thread(find, key[:MAX_KEY])
    if watched is None:
        raise HTTPException(404, "there is no such run")
    return watched


def _json(value: Any) -> Response:
    return Response(_text(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def _text(value: Any) -> str:
    """ASCII: what is half of a character stays one, and every line ends where it should."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
