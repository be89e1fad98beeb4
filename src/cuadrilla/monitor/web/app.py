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
import threading
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


def make_dashboard(runs: Runs, *, ends: threading.Event) -> FastAPI:
    """The web application. `ends` ends its streams, so that the process can end."""
    app = FastAPI(title="cuadrilla", openapi_url=None, docs_url=None, redoc_url=None)

    @app.get(PAGE)
    async def page(request: Request) -> Response:
        text, policy = page_text(language=language(otherwise=request.headers.get("accept-language", "")))
        return HTMLResponse(text, headers=headers(policy))

    @app.get(OPEN_TO_ALL[0])
    @app.get(OPEN_TO_ALL[1])
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/api/runs")
    def summaries() -> Response:
        return _json({"runs": runs.summaries()})

    @app.get("/metrics")
    def metrics() -> Response:
        found = [(key, run) for key in runs.paths() if (run := runs.watched(key)) is not None]
        return Response(metrics_text(found), media_type=CONTENT_TYPE)

    _add_run(app, runs, ends=ends)
    return app


def _add_run(app: FastAPI, runs: Runs, *, ends: threading.Event) -> None:
    def watched(of: str = "") -> RunReader:
        if (found := runs.watched(of)) is None:
            raise HTTPException(404, "there is no such run")
        return found

    @app.get("/api/follow", response_class=EventSourceResponse)
    async def follow(reader: Annotated[RunReader, Depends(watched)]) -> AsyncIterator[ServerSentEvent]:
        sent: dict[str, Any] = {}
        while not ends.is_set():
            if news := await asyncio.to_thread(_news, reader, sent):
                yield ServerSentEvent(raw_data=news)
            await asyncio.sleep(POLL_SECONDS)

    @app.get("/api/run")
    def compared(reader: Annotated[RunReader, Depends(watched)]) -> Response:
        parts = reader.page()
        return _json({name: parts[name] for name in ("figures", "about")})

    @app.post("/api/stop")
    def stop(of: str = "") -> Response:
        if not runs.stop(of):
            raise HTTPException(409, "no process of this machine trains it")
        return _json({})

    @app.post("/api/notes")
    async def note(reader: Annotated[RunReader, Depends(watched)], request: Request) -> Response:
        text = (await request.body()).decode(errors="replace")
        if len(text.encode()) > MAX_NOTES_BYTES:
            raise HTTPException(413, "the notes are too long")
        try:
            await asyncio.to_thread(write_atomic, reader.run.notes, text, private=True)
        except ResourceError as error:
            raise HTTPException(409, error.message) from error
        return _json({})


def _news(reader: RunReader, sent: dict[str, Any]) -> str:
    """The parts of the page that are not as `sent`, as JSON; empty if there are none. Adds them to `sent`."""
    news = {name: part for name, part in reader.page().items() if sent.get(name) != part}
    sent.update(news)
    return _text(news) if news else ""


def _json(value: Any) -> Response:
    return Response(_text(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def _text(value: Any) -> str:
    """JSON in ASCII: lone surrogates can be sent, and no character in a text ends a line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
