"""The routes of a service: OpenAI's completions over models of our own, predictions of a task, what it is doing.

Errors have OpenAI's form and never a traceback. A caller who leaves gives up what it asked for.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from cuadrilla.serve.answers import (
    DONE,
    Continuation,
    Piece,
    Spelling,
    chat_logprobs,
    completion_logprobs,
    event,
    usage,
)
from cuadrilla.serve.edge import OPEN_TO_ALL, Refusal, timed_out
from cuadrilla.serve.meters import Meters
from cuadrilla.serve.openai import (
    Asked,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PredictRequest,
    TokenizeRequest,
)
from cuadrilla.serve.page import page
from cuadrilla.serve.predictions import Predictors
from cuadrilla.serve.served import Models, ServedModel
from cuadrilla.version import __version__

ROUTES = frozenset(
    ("/", *OPEN_TO_ALL, "/metrics", "/tokenizer_info", "/tokenize", "/detokenize", "/v1/models", "/v1/completions",
     "/v1/chat/completions", "/v1/predict")
)  # fmt: skip
USUAL_TOKENS = 16
"""Of a completion that does not say, as in OpenAI's API."""
HELD_BACK_SECONDS = 0.25
FORMS = {
    "prompt": "a text, a list of texts, token numbers, or a list of such lists",
    "stop": "a text, or a list of texts",
}
"""Fields of several forms: what is wrong with each of them would say little."""
CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join('\n\n') }}"
"""What `ChatRequest.prompt` does, for clients that do it themselves."""
T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Service:
    """What the routes work on."""

    models: Models
    predictors: Predictors
    most_seconds: float
    """Of one call."""
    meters: Meters = field(default_factory=lambda: Meters(routes=ROUTES))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Its models ready, in this event loop. Raises ResourceError where memory is too small for them."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.end_calls)
            for model in self.models.by_name.values():
                stack.push_async_callback(model.close)
                await model.start()
                self.meters.watch(model.name, model.busyness)
            yield

    def end_calls(self) -> None:
        """Whoever still waits for more of a text, or for a prediction, is told that there is no more."""
        for model in self.models.by_name.values():
            model.end()
        self.predictors.end()


def make_app(service: Service) -> FastAPI:
    """The application, without what `edge.py` checks before it."""
    app = FastAPI(title="cuadrilla", version=__version__, docs_url=None, redoc_url=None)
    _handle_errors(app)
    _add_state(app, service)
    _add_tools(app, service)
    _add_completions(app, service)
    _add_predictions(app, service)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(_request: Request, refusal: Refusal) -> Response:
        if refusal.status == 429:
            await asyncio.sleep(HELD_BACK_SECONDS)  # who asks again at once must not keep others from their tokens
        return refusal.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        """Names the field, and never repeats what was sent."""
        first = error.errors()[0]
        path = [] if first["type"] == "json_invalid" else [str(part) for part in first["loc"] if part != "body"]
        if path and path[0] in FORMS and len(path) > 1:
            return Refusal(422, f"{path[0]}: give {FORMS[path[0]]}", param=path[0]).response()
        told = first["msg"] if len(error.errors()) == 1 else f"{first['msg']} (and {len(error.errors()) - 1} more)"
        return Refusal(422, f"{'.'.join(path) or 'body'}: {told}", param=path[0] if path else None).response()

    @app.exception_handler(HTTPException)
    async def not_found(_request: Request, error: HTTPException) -> Response:
        return Refusal(error.status_code, str(error.detail).lower()).response(**(error.headers or {}))

    @app.exception_handler(Exception)
    async def unforeseen(_request: Request, _error: Exception) -> Response:
        """The log is told by the server, to which the error is raised again."""
        return Refusal(500, "the service has failed; its log says how").response()


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get(OPEN_TO_ALL[0])
    @app.get(OPEN_TO_ALL[1])
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        served: list[dict[str, Any]] = [
            {"id": model.name, "created": model.created, "max_model_len": model.context}
            for model in service.models.by_name.values()
        ]
        served += [{"id": name, "created": 0} for name in service.predictors.by_name]
        return {"object": "list", "data": [{**one, "object": "model", "owned_by": "cuadrilla"} for one in served]}

    @app.get("/", include_in_schema=False)
    async def playground(request: Request) -> Response:
        languages = request.headers.get("accept-language", "")
        return page(list(service.models.by_name), service.predictors.schemas, languages=languages)


def _add_tools(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> Response:
        model = service.models.find(asked.model)
        tokenizer = model.opened.tokenizer

        def answer() -> bytes:
            is_end = asked.prompt == tokenizer.decode(
                [tokenizer.end_of_text]
            )  # how evaluation harnesses ask for its id
            tokens = [tokenizer.end_of_text] if is_end else tokenizer.encode(asked.prompt)
            return json.dumps({"tokens": tokens, "count": len(tokens)}).encode()

        return Response(await model.beside(answer), media_type="application/json")

    @app.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> dict[str, Any]:
        found = service.models.find(model)
        end = found.opened.tokenizer.decode([found.opened.tokenizer.end_of_text])
        special = {"eos_token": end, "bos_token": end, "pad_token": None, "chat_template": CHAT_TEMPLATE}
        return {**special, "vocab_size": found.opened.model.config.vocab_size, "model_max_length": found.context}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        model = service.models.find(asked.model)
        if asked.tokens and max(asked.tokens) >= model.opened.model.config.vocab_size:
            raise Refusal(422, "tokens are outside of the vocabulary", param="tokens")
        return {"prompt": await model.beside(partial(model.opened.tokenizer.decode, asked.tokens))}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a call wants of one model: continuations, of which prompt each is, and how it is told."""

    id: str
    model: ServedModel
    choices: Sequence[Continuation]
    prompts: Sequence[list[int]]
    chat: bool
    with_logprobs: bool
    echo: bool
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, int]:
        return usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
        )

    def head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}


async def _begin(service: Service, asked: CompletionRequest | ChatRequest) -> Completion:
    """Its rows wait for their slots from now on. Raises Refusal."""
    asked.check()
    model = service.models.find(asked.model)
    chat = isinstance(asked, ChatRequest)
    if isinstance(asked, ChatRequest):
        given: Sequence[str | list[int]] = [asked.prompt]
        num_top = (asked.top_logprobs or 0) if asked.logprobs else None
        max_tokens = next((n for n in (asked.max_completion_tokens, asked.max_tokens) if n is not None), model.context)
        echo = False
    else:
        given, num_top = asked.prompts, asked.logprobs
        max_tokens = USUAL_TOKENS if asked.max_tokens is None else asked.max_tokens
        echo = bool(asked.echo)
    sampling = asked.sampling(max_tokens=max_tokens, end_of_text=model.opened.tokenizer.end_of_text)
    has_work = bool(max_tokens) or (echo and num_top is not None)
    model.batcher.refuse_when_full(len(given) * (asked.n or 1) if has_work else 0)  # encoding a prompt costs, too
    prompts = [await model.prompt_ids(prompt) for prompt in given]
    rows = [
        row
        for ids in prompts
        for row in model.rows(
            ids, sampling, num=asked.n or 1, num_top=num_top, scores_prompt=echo and num_top is not None
        )
    ]
    calls = model.batcher.submit(rows)
    service.meters.prompt_tokens.labels(model.name).inc(sum(map(len, prompts)))
    return Completion(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        model=model,
        choices=[
            Continuation(call, index=index, tokenizer=model.opened.tokenizer, stop=sampling.stop)
            for index, call in enumerate(calls)
        ],
        prompts=prompts,
        chat=chat,
        with_logprobs=num_top is not None,
        echo=echo,
    )


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await _completed(service, asked, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await _completed(service, asked, request)


async def _completed(service: Service, asked: Asked, request: Request) -> Response:
    assert isinstance(asked, CompletionRequest | ChatRequest)
    work = await _begin(service, asked)
    if asked.stream:
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        events = _events(service, work, with_usage=with_usage)
        first = await _while_connected(request, anext(events))  # until then a proxy may still ask another service
        return StreamingResponse(_continued(first, events), media_type="text/event-stream")
    return Response(await _while_connected(request, _whole(service, work)), media_type="application/json")


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """What it gives; when the caller leaves first, it is cancelled."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())  # the body has been read: only a farewell can follow
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Refusal(499, "the caller has left")  # nobody reads it
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _whole(service: Service, work: Completion) -> bytes:
    """The answer in one piece: put together beside the event loop, as it may name millions of tokens. Raises Refusal
    when it takes too long."""
    texts = ["" for _ in work.choices]
    told = [_Teller(work, choice) for choice in work.choices]
    try:
        async with asyncio.timeout(service.most_seconds):
            async for choice, piece in _pieces(service, work):
                texts[choice.index] += piece.text
                told[choice.index].take(piece)
    except TimeoutError:
        raise timed_out(service.most_seconds) from None

    def put_together() -> bytes:
        choices = [teller.whole(text) for teller, text in zip(told, texts, strict=True)]
        return json.dumps({**work.head(chunk=False), "choices": choices, "usage": work.usage}).encode()

    return await asyncio.to_thread(put_together)


async def _continued(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for each in rest:
            yield each


async def _events(service: Service, work: Completion, *, with_usage: bool) -> AsyncGenerator[str, None]:
    """The answer as server-sent events. What goes wrong on the way is an event, too."""
    told = [_Teller(work, choice) for choice in work.choices]
    nothing = {"usage": None} if with_usage else {}
    try:
        async with asyncio.timeout(service.most_seconds):
            async for choice, piece in _pieces(service, work):
                if (told_now := told[choice.index].chunk(piece)) is not None:
                    yield event({**work.head(chunk=True), "choices": [told_now], **nothing})
    except TimeoutError:
        yield event(timed_out(service.most_seconds).body)
    if with_usage:
        yield event({**work.head(chunk=True), "choices": [], "usage": work.usage})
    yield DONE


async def _pieces(service: Service, work: Completion) -> AsyncGenerator[tuple[Continuation, Piece], None]:
    """Of all choices, as they come, measured. Whoever is not read to the end gives up its slot."""
    meters, last = service.meters, dict.fromkeys(work.choices, 0.0)
    try:
        async with contextlib.aclosing(_merged(work.choices)) as merged:
            async for choice, piece in merged:
                now = time.perf_counter()
                if choice.num_tokens and not last[choice]:
                    meters.waiting_seconds.observe(max(choice.call.began - choice.call.arrived, 0.0))
                    meters.first_token_seconds.observe(now - choice.call.arrived)
                elif last[choice]:
                    meters.between_tokens_seconds.observe(now - last[choice])
                last[choice] = now
                yield choice, piece
    finally:
        for choice in work.choices:
            choice.call.cancel()
        meters.tokens.labels(work.model.name).inc(sum(choice.num_tokens for choice in work.choices))


async def _merged(choices: Sequence[Continuation]) -> AsyncGenerator[tuple[Continuation, Piece], None]:
    if len(choices) == 1:
        async for piece in choices[0]:
            yield choices[0], piece
        return
    found: asyncio.Queue[tuple[Continuation, Piece]] = asyncio.Queue()

    async def pump(choice: Continuation) -> None:
        async for piece in choice:
            found.put_nowait((choice, piece))

    pumps = [asyncio.ensure_future(pump(choice)) for choice in choices]
    try:
        left = len(choices)
        while left:
            choice, piece = await found.get()
            left -= piece.reason is not None
            yield choice, piece
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class _Teller:
    """How a choice is told: its text, the log probabilities of its tokens, the echo of its prompt before them."""

    def __init__(self, work: Completion, choice: Continuation) -> None:
        self._work, self._choice = work, choice
        self._spelling = Spelling(choice.tokenizer)
        self._begun = False
        self._pieces: list[Piece] = []

    def take(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def whole(self, text: str) -> dict[str, Any]:
        scores = tuple(score for piece in self._pieces for score in piece.scores)
        reason = self._pieces[-1].reason if self._pieces else None
        told = self.chunk(Piece(text, scores, reason))
        assert told is not None
        if self._work.chat:
            told["message"] = {"role": "assistant", "content": told.pop("delta").get("content", ""), "refusal": None}
        return told

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """None where there is nothing to tell yet."""
        if self._begun and not piece.text and not piece.scores and piece.reason is None:
            return None
        first, self._begun = not self._begun, True
        told: dict[str, Any] = {"index": self._choice.index}
        if self._work.chat:
            role = {"role": "assistant"} if first else {}
            told["delta"] = {**role, **({"content": piece.text} if piece.text or first else {})}
            scored = chat_logprobs(self._spelling, piece.scores) if self._work.with_logprobs else None
        else:
            told["text"] = (self._echo() if first and self._work.echo else "") + piece.text
            scored = self._scored(piece, first=first) if self._work.with_logprobs else None
        return {**told, "logprobs": scored, "finish_reason": piece.reason}

    def _echo(self) -> str:
        return self._choice.tokenizer.decode(self._prompt)

    @property
    def _prompt(self) -> list[int]:
        prompts = self._work.prompts
        return prompts[self._choice.index * len(prompts) // len(self._work.choices)]

    def _scored(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        if first and self._work.echo:
            scores = [*self._choice.call.row.prompt_scores, *piece.scores]
            return completion_logprobs(self._spelling, scores, first=self._prompt[0])
        return completion_logprobs(self._spelling, piece.scores)


def _add_predictions(app: FastAPI, service: Service) -> None:
    @app.get("/v1/predict")
    async def schemas() -> list[Mapping[str, Any]]:
        """What each task takes and gives, as JSON schemas."""
        return service.predictors.schemas

    @app.post("/v1/predict")
    async def predict(asked: PredictRequest, request: Request) -> Response:
        predictor = service.predictors.find(asked.model)
        answer = await _while_connected(request, predictor.ask(asked.inputs, seconds=service.most_seconds))
        return Response(answer, media_type="application/json")
