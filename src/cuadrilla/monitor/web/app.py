"""What the dashboard's page asks for. Everything is read from run directories; nothing is written.

* `GET /api/runs`: a row for each run, and what hands out runs: the queue, searches. `GET /api/curves?run=KEY`: the
  curves of one, for a comparison.
* `GET /api/follow?run=KEY`: a stream of events, each what has changed in the run since the one before.
  `GET /api/jobs?of=KEY`: the same of a queue or a search.
* `POST /api/doctor`: what `cuadrilla doctor --json` says of this machine, in a process of its own, one at a time.
* `GET /metrics`: all runs for Prometheus.

Who may call is the concern of `serve/edge.py`, which stands before it.
"""

import asyncio
import contextlib
import json
from asyncio import AbstractEventLoop, Event
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from cuadrilla.monitor.prometheus import CONTENT_TYPE, metrics_text
from cuadrilla.monitor.watch import P, Watched, WatchedRun, WatchPlace
from cuadrilla.monitor.watch_jobs import JobsPlace
from cuadrilla.monitor.web.examine import Examiner
from cuadrilla.monitor.web.page import dashboard_page
from cuadrilla.monitor.web.queues import Queues
from cuadrilla.monitor.web.runs import MOST_OPEN, Runs
from cuadrilla.serve.edge import OPEN_TO_ALL, PAGE

WITHOUT_TOKEN = (OPEN_TO_ALL, PAGE)
"""The page itself tells nothing: it has its token from the part of its address that no server sees."""
POLL_SECONDS = 1.0
MOST_STREAMS = 64
MOST_KEY = 400
W = TypeVar("W")


class Dashboard:
    """`drain`: streams end, so that the process can."""

    def __init__(self, runs: Runs, *, examiner: Examiner | None = None) -> None:
        self.runs, self.queues = runs, Queues(runs)
        self._examiner = examiner or Examiner()
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
        app.get(OPEN_TO_ALL)(self._healthy)
        app.get("/api/runs")(self._runs)
        app.get("/api/curves")(self._curves)
        app.get("/api/follow", response_class=EventSourceResponse)(self._make_follow())
        app.get("/api/jobs", response_class=EventSourceResponse)(self._make_follow_jobs())
        app.post("/api/doctor")(self._doctor)
        app.get("/metrics")(self._metrics)
        return app

    async def _page(self, request: Request) -> Response:
        return dashboard_page(languages=request.headers.get("accept-language", ""))

    async def _healthy(self) -> Response:
        return _json({"status": "ok"})

    async def _runs(self) -> Response:
        runs = await asyncio.to_thread(self.runs.summaries)
        return _json({"runs": runs, "queues": await asyncio.to_thread(self.queues.summaries)})

    async def _curves(self, run: str = "") -> Response:
        watched = await self._watched(run)
        while watched.is_behind:
            await asyncio.to_thread(watched.refresh)
        news, _ = await asyncio.to_thread(watched.news, WatchPlace())
        return _json({"run": run, "head": news.get("head"), "figures": news.get("figures")})

    async def _watched(self, run: str = "") -> WatchedRun:
        """Raises 404."""
        return await _found(self.runs.watched, run)

    def _make_follow(self) -> Any:
        async def allowed(run: str = "") -> str:
            await self._watched(run)
            self._require_room()
            return run

        async def follow(run: str = Depends(allowed)) -> AsyncIterator[ServerSentEvent]:
            async for event in self._told(self.runs.watched, run, WatchPlace()):
                yield event

        return follow

    def _make_follow_jobs(self) -> Any:
        async def allowed(of: str = "") -> str:
            await _found(self.queues.watched, of)
            self._require_room()
            return of

        async def follow(of: str = Depends(allowed)) -> AsyncIterator[ServerSentEvent]:
            async for event in self._told(self.queues.watched, of, JobsPlace()):
                yield event

        return follow

    def _require_room(self) -> None:
        """Raises 503."""
        if len(self._ends) >= MOST_STREAMS:
            raise HTTPException(503, "too many pages are open")

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

    async def _doctor(self) -> Response:
        return _json(await self._examiner.examine())

    async def _metrics(self) -> Response:
        return Response(await asyncio.to_thread(self._metrics_text), media_type=CONTENT_TYPE)

    def _metrics_text(self) -> bytes:
        watched = ((key, self.runs.watched(key)) for key in self.runs.names()[:MOST_OPEN])
        return metrics_text([(key, run) for key, run in watched if run is not None])


async def _found(find: Callable[[str], W | None], key: str) -> W:
    """Raises 404."""
    watched = await asyncio.to_thread(find, key[:MOST_KEY])
    if watched is None:
        raise HTTPException(404, "there is no such run")
    return watched


def _json(value: Any) -> Response:
    return Response(_text(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def _text(value: Any) -> str:
    """ASCII: what is half of a character stays one, and every line ends where it should."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
