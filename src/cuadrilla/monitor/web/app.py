"""The HTTP calls of the dashboard's page, answered from run directories.

* `GET /api/runs`: a row for each run.
* `GET /api/follow?of=KEY`: a stream of server-sent events, each with the parts of the page that have changed.
* `GET /api/run?of=KEY`: the curves and the settings of one run, for a comparison.
* `POST /api/stop?of=KEY`: the run saves and stops. `POST /api/notes?of=KEY`: store a person's notes on the run.
* `GET /metrics`: all runs for Prometheus.

`serve/edge.py` checks each request before it arrives here.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from cuadrilla.errors import ResourceError
from cuadrilla.messages import language
from cuadrilla.monitor.prometheus import CONTENT_TYPE, metrics_text
from cuadrilla.monitor.run import MAX_NOTES_BYTES, RunReader
from cuadrilla.monitor.web.page import page_text
from cuadrilla.monitor.web.runs import Runs
from cuadrilla.rundir import write_atomic
from cuadrilla.serve.edge import OPEN_TO_ALL, PAGE
from cuadrilla.serve.page import headers

WITHOUT_TOKEN = (*OPEN_TO_ALL, PAGE)
"""Paths open to all. The page itself holds no data: it takes the token from its address, after `#`."""
POLL_SECONDS = 1.0


class Dashboard:
    """The web application. `drain` ends its streams, so that the process can end."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._drains = False
        self.app = FastAPI(title="cuadrilla", openapi_url=None, docs_url=None, redoc_url=None)
        self.app.get(PAGE)(self._page)
        for path in OPEN_TO_ALL:
            self.app.get(path)(self._healthy)
        self.app.get("/api/runs")(self._runs)
        self.app.get("/api/run")(self._run)
        self.app.post("/api/stop")(self._stop)
        self.app.post("/api/notes")(self._note)
        self.app.get("/metrics")(self._metrics)

        async def follow(watched: Annotated[RunReader, Depends(self._watched)]) -> AsyncIterator[ServerSentEvent]:
            sent: dict[str, Any] = {}
            while not self._drains:
                if news := await asyncio.to_thread(_news, watched, sent):
                    yield ServerSentEvent(raw_data=news)
                await asyncio.sleep(POLL_SECONDS)

        self.app.get("/api/follow", response_class=EventSourceResponse)(follow)

    def drain(self) -> None:
        """May be called from any thread, and from a signal handler."""
        self._drains = True

    async def _page(self, request: Request) -> Response:
        text, policy = page_text(language=language(otherwise=request.headers.get("accept-language", "")))
        return HTMLResponse(text, headers=headers(policy))

    async def _healthy(self) -> Response:
        return _json({"status": "ok"})

    async def _runs(self) -> Response:
        return _json({"runs": await asyncio.to_thread(self.runs.summaries)})

    async def _run(self, of: str = "") -> Response:
        watched = await self._watched(of)
        page = await asyncio.to_thread(watched.page)
        return _json({name: page[name] for name in ("figures", "about")})

    async def _stop(self, of: str = "") -> Response:
        if not await asyncio.to_thread(self.runs.stop, of):
            raise HTTPException(409, "no process of this machine trains it")
        return _json({})

    async def _note(self, request: Request, of: str = "") -> Response:
        watched, text = await self._watched(of), (await request.body()).decode(errors="replace")
        if len(text.encode()) > MAX_NOTES_BYTES:
            raise HTTPException(413, "the notes are too long")
        try:
            await asyncio.to_thread(write_atomic, watched.run.notes, text, private=True)
        except ResourceError as error:
            raise HTTPException(409, error.message) from error
        return _json({})

    async def _watched(self, of: str = "") -> RunReader:
        """The reader of a run. Raises HTTPException (404)."""
        watched = await asyncio.to_thread(self.runs.watched, of)
        if watched is None:
            raise HTTPException(404, "there is no such run")
        return watched

    async def _metrics(self) -> Response:
        return Response(await asyncio.to_thread(self._metrics_text), media_type=CONTENT_TYPE)

    def _metrics_text(self) -> bytes:
        watched = ((key, self.runs.watched(key)) for key in self.runs.names())
        return metrics_text([(key, run) for key, run in watched if run is not None])


def _news(watched: RunReader, sent: dict[str, Any]) -> str:
    """The parts of the page that are not as `sent`, as JSON; empty if there are none. Adds them to `sent`."""
    watched.refresh()
    news = {name: part for name, part in watched.page().items() if sent.get(name) != part}
    sent.update(news)
    return _text(news) if news else ""


def _json(value: Any) -> Response:
    return Response(_text(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def _text(value: Any) -> str:
    """JSON in ASCII: lone surrogates can be sent, and no character in a text ends a line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
