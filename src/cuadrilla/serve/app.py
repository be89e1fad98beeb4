"""The routes of a service: OpenAI's completions, predictions of a user's task, metrics, the page to try them.

Errors have OpenAI's form and never a traceback. If a caller disconnects, its work is cancelled.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.exceptions import HTTPException

from cuadrilla.serve.completions import begin
from cuadrilla.serve.edge import OPEN_TO_ALL, Refusal
from cuadrilla.serve.openai import ChatRequest, CompletionRequest, PredictRequest
from cuadrilla.serve.page import headers, page
from cuadrilla.serve.predictions import Predictor
from cuadrilla.serve.served import ServedModel
from cuadrilla.version import __version__

T = TypeVar("T")


def make_app(model: ServedModel | Predictor) -> FastAPI:
    """The application, without the checks of `edge.py`. It has the routes of a language model, or those of a task."""
    app = FastAPI(title="cuadrilla", version=__version__, docs_url=None, redoc_url=None, strict_content_type=False)
    _handle_errors(app)
    _add_state(app, model)
    if isinstance(model, ServedModel):
        _add_completions(app, model)
    else:
        _add_predictions(app, model)
    return app


def end_calls(model: ServedModel | Predictor) -> None:
    """End all texts that callers still wait for, with the reason `error`."""
    if isinstance(model, ServedModel):
        model.batcher.end()


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refused(_request: Request, error: HTTPException) -> Response:
        refusal = error if isinstance(error, Refusal) else Refusal(error.status_code, str(error.detail).lower())
        return refusal.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        """Names the wrong field, and never repeats what was sent."""
        found = [] if error.errors()[0]["type"] == "json_invalid" else list(error.errors()[0]["loc"][1:])
        if not found and "json" not in request.headers.get("content-type", ""):
            return Refusal(400, "the body must be JSON, with the header Content-Type: application/json").response()
        messages = dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in error.errors())
        field_name = str(found[0]) if found else None
        return Refusal(400, f"{field_name or 'body'}: {'; '.join(messages)}", param=field_name).response()

    @app.exception_handler(Exception)
    async def unforeseen(_request: Request, _error: Exception) -> Response:
        """After this answer the error is raised again, and the server logs it."""
        return Refusal(500, "the service has failed; its log says how").response()


def _add_state(app: FastAPI, model: ServedModel | Predictor) -> None:
    task = model.schema if isinstance(model, Predictor) else None

    @app.get(OPEN_TO_ALL[0])
    @app.get(OPEN_TO_ALL[1])
    async def health() -> dict[str, str]:
        if isinstance(model, ServedModel) and model.batcher.is_closing:  # an error of ours, or a signal
            raise Refusal(503, "the service answers no more; its log says why", code="draining")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = model.meters.text() if isinstance(model, ServedModel) else b""
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_shown(model)]}

    @app.get("/v1/models/{name:path}")
    async def named(name: str) -> dict[str, Any]:
        _check(name, model)
        return _shown(model)

    @app.get("/", include_in_schema=False)
    async def playground(request: Request) -> Response:
        text, policy = page(model.name, task, languages=request.headers.get("accept-language", ""))
        return HTMLResponse(text, headers=headers(policy))


def _add_completions(app: FastAPI, model: ServedModel) -> None:
    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await complete(asked, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await complete(asked, request)

    async def complete(asked: CompletionRequest | ChatRequest, request: Request) -> Response:
        _check(asked.model, model)
        work = await begin(model, asked)
        if not asked.stream:
            return Response(await _while_connected(request, work.whole()), media_type="application/json")
        events = work.events()
        first = await _while_connected(request, anext(events))  # before it, a proxy may still ask another service
        return StreamingResponse(_continued(first, events), media_type="text/event-stream")


def _add_predictions(app: FastAPI, predictor: Predictor) -> None:
    @app.get("/v1/predict")
    async def schemas() -> list[Mapping[str, Any]]:
        """The inputs and outputs of the task, as JSON schemas."""
        return [predictor.schema]

    @app.post("/v1/predict")
    async def predict(asked: PredictRequest, request: Request) -> Response:
        _check(asked.model, predictor)
        return Response(await _while_connected(request, predictor.ask(asked.inputs)), media_type="application/json")


def _check(name: str | None, model: ServedModel | Predictor) -> None:
    """Raises Refusal if a caller asks for another model."""
    if name not in (None, model.name):
        template = f"there is no such model; here: {model.name}"
        raise Refusal(404, template, param="model", code="model_not_found")


def _shown(model: ServedModel | Predictor) -> dict[str, Any]:
    """A model as OpenAI's API lists it, with the length of its context as in vLLM's."""
    shown: dict[str, Any] = {"id": model.name, "object": "model", "created": 0, "owned_by": "cuadrilla"}
    if isinstance(model, ServedModel):
        shown |= {"created": model.created, "max_model_len": model.context}
    return shown


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the caller disconnects first."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())  # the body has been read: only a disconnect can follow
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Refusal(499, "the caller has left")  # nobody reads this answer
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _continued(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for each in rest:
            yield each
