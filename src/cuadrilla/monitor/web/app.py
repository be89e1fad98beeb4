"""What the dashboard's page asks for. Everything is read from run directories; nothing is written.

* `GET /api/runs`: a row for each run. `GET /api/curves?run=KEY`: the curves of one, for a comparison.
* `GET /api/follow?run=KEY`: a stream of events, each what has changed in the run since the one before.
* `POST /api/doctor`: what `cuadrilla doctor --json` says of this machine, in a process of its own, one at a time.
* `GET /metrics`: all runs for Prometheus.

Who may call is the concern of `serve/edge.py`, which stands before it.
"""

import asyncio
import contextlib
import json
from asyncio import AbstractEventLoop, Event
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from cuadrilla.monitor.prometheus import CONTENT_TYPE, metrics_text
from cuadrilla.monitor.watch import WatchedRun, WatchPlace
from cuadrilla.monitor.web.examine import Examiner
from cuadrilla.monitor.web.page import dashboard_page
from cuadrilla.monitor.web.runs import MOST_OPEN, Runs
from cuadrilla.serve.edge import OPEN_TO_ALL, PAGE

WITHOUT_TOKEN = (OPEN_TO_ALL, PAGE)
"""The page itself tells nothing: it has its token from the part of its address that no server sees."""
POLL_SECONDS = 1.0
MOST_STREAMS = 64
MOST_KEY = 400


class Dashboard:
    """`drain`: streams end, so that the process can."""

    def __init__(self, runs: Runs, *, examiner: Examiner | None = None) -> None:
        self.runs = runs
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
        app.post("/api/doctor")(self._doctor)
        app.get("/metrics")(self._metrics)
        return app

    async def _page(self, request: Request) -> Response:
        return dashboard_page(languages=request.headers.get("accept-language", ""))

    async def _healthy(self) -> Response:
        return _json({"status": "ok"})

    async def _runs(self) -> Response:
        return _json({"runs": await asyncio.to_thread(self.runs.summaries)})

    async def _curves(self, run: str = "") -> Response:
        watched = await self._watched(run)
        while watched.is_behind:
            await asyncio.to_thread(watched.refresh)
        news, _ = await asyncio.to_thread(watched.news, WatchPlace())
        return _json({"run": run, "head": news.get("head"), "figures": news.get("figures")})

    async def _watched(self, run: str = "") -> WatchedRun:
        """Raises 404."""
        watched = await asyncio.to_thread(self.runs.watched, run[:MOST_KEY])
        if watched is None:
            raise HTTPException(404, "there is no such run")
        return watched

    def _make_follow(self) -> Any:
        async def allowed(run: str = "") -> str:
            await self._watched(run)
            if len(self._ends) >= MOST_STREAMS:
                raise HTTPException(503, "too many pages are open")
            return run

        async def follow(run: str = Depends(allowed)) -> AsyncIterator[ServerSentEvent]:
            place, end = WatchPlace(), Event()
            self._ends[end] = asyncio.get_running_loop()
            try:
                while not (self._drains or end.is_set()):
                    watched = await self._watched(run)
                    news, place = await asyncio.to_thread(watched.news, place)
                    if news:
                        yield ServerSentEvent(raw_data=await asyncio.to_thread(_text, news))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(end.wait(), 0 if watched.is_behind else POLL_SECONDS)
            except HTTPException:  # its folder has gone
                return
            finally:
                del self._ends[end]

        return follow

    async def _doctor(self) -> Response:
        return _json(await self._examiner.examine())

    async def _metrics(self) -> Response:
        return Response(await asyncio.to_thread(self._metrics_text), media_type=CONTENT_TYPE)

    def _metrics_text(self) -> bytes:
        watched = ((key, self.runs.watched(key)) for key in self.runs.names()[:MOST_OPEN])
        return metrics_text([(key, run) for key, run in watched if run is not None])


def _json(value: Any) -> Response:
    return Response(_text(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def _text(value: Any) -> str:
    """ASCII: what is half of a character stays one, and every line ends where it should."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
