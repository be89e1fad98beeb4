"""Answers to completion requests: the text of continued rows, whole or in pieces, in the form of OpenAI's API."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.model.generate import TextStream
from cuadrilla.model.rows import Reason, Row, Score
from cuadrilla.serve.openai import ChatRequest, CompletionRequest
from cuadrilla.serve.served import ServedModel

DONE = "data: [DONE]\n\n"


class Continuation:
    """The text of one row while it grows; `chunk` gives what is new. A stop text ends it, too."""

    def __init__(self, row: Row, *, index: int, stream: TextStream, tokenizer: Tokenizer, chat: bool) -> None:
        self.row, self._index, self._stream, self._tokenizer, self._chat = row, index, stream, tokenizer, chat
        self.num_tokens = 0
        self.reason: Reason | None = None
        self._text, self._scores, self._begun = "", list[Score](), False

    def take(self, token: int | None, reason: Reason | None) -> None:
        if token is not None:
            self._scores += self.row.scores[self.num_tokens : self.num_tokens + 1]
            self.num_tokens += 1
            self._text += self._stream.push(token)
        if reason is not None:
            self._text += self._stream.finish()
        self.reason = "stop" if self._stream.stopped else reason

    @property
    def has_news(self) -> bool:
        return bool(self._text or self._scores or self.reason or not self._begun)

    def chunk(self, *, echo: bool) -> dict[str, Any]:
        """What is new, in the form of a stream. With `echo` the first chunk begins with the prompt."""
        first, self._begun = not self._begun, True
        text, self._text = self._text, ""
        scores, self._scores = self._scores, []
        echoes = echo and first
        with_scores = self.row.num_top is not None
        if self._chat:
            shown: dict[str, Any] = {"delta": {**({"role": "assistant"} if first else {}), "content": text}}
            scored = chat_logprobs(self._tokenizer, scores) if with_scores else None
        else:
            shown = {"text": (self._tokenizer.decode(self.row.prompt) if echoes else "") + text}
            scores = [*(self.row.prompt_scores if echoes else ()), *scores]
            first_token = self.row.prompt[:echoes]
            scored = completion_logprobs(self._tokenizer, scores, first=first_token) if with_scores else None
        return {"index": self._index, **shown, "logprobs": scored, "finish_reason": self.reason}

    def whole(self, *, echo: bool) -> dict[str, Any]:
        """The ended text, in the form of an answer in one piece."""
        shown = self.chunk(echo=echo)
        if self._chat:
            shown["message"] = {**shown.pop("delta"), "refusal": None}
        return shown


class Completion:
    """The answer of one model to one call. Make it with `begin`."""

    def __init__(
        self, model: ServedModel, asked: CompletionRequest | ChatRequest, prompts: Sequence[list[int]]
    ) -> None:
        """Submits the rows, which then wait for slots. Raises Refusal."""
        self._model, self._asked, self._meters = model, asked, model.meters
        self._chat = isinstance(asked, ChatRequest)
        tokenizer = model.opened.tokenizer
        sampling = asked.sampling(max_tokens=asked.tokens_at_most(model.context), end_of_text=tokenizer.end_of_text)
        rows = []
        for prompt, number in product(prompts, range(asked.n or 1)):
            most = min(sampling.max_tokens, model.context - len(prompt))
            own = replace(sampling, stop=(), max_tokens=most, seed=sampling.seed + number)
            scores_prompt = asked.echo and asked.num_top is not None
            rows.append(Row(list(prompt), own, num_top=asked.num_top, scores_prompt=scores_prompt))
        self._arrived = time.perf_counter()
        self._steps = model.batcher.submit(rows)
        self._choices = [
            Continuation(
                row,
                index=index,
                stream=TextStream(tokenizer, stop=sampling.stop),
                tokenizer=tokenizer,
                chat=self._chat,
            )
            for index, row in enumerate(rows)
        ]
        self._num_prompt_tokens = sum(map(len, prompts))
        self._meters.prompt_tokens.inc(self._num_prompt_tokens)
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    async def whole(self) -> bytes:
        """The answer in one piece. Another thread encodes it, because it may name millions of tokens."""
        async for _ in self._growing():
            pass

        def put_together() -> bytes:
            choices = [choice.whole(echo=self._asked.echo) for choice in self._choices]
            return json.dumps(self._head(chunk=False) | {"choices": choices, "usage": self._usage}).encode()

        return await asyncio.to_thread(put_together)

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        with_usage = self._asked.stream_options is not None and self._asked.stream_options.include_usage
        nothing = {"usage": None} if with_usage else {}
        async with aclosing(self._growing()) as growing:  # its rows leave at once if the caller does
            async for choice in growing:
                if choice.has_news:
                    shown = choice.chunk(echo=self._asked.echo)
                    yield event({**self._head(chunk=True), "choices": [shown], **nothing})
        if with_usage:
            yield event({**self._head(chunk=True), "choices": [], "usage": self._usage})
        yield DONE

    async def _growing(self) -> AsyncGenerator[Continuation, None]:
        """Each choice whenever it has grown; the times are measured. If reading stops, rows give up their slots."""
        going, last = {choice.row: choice for choice in self._choices}, dict[Row, float]()
        try:
            while going:
                row, token, reason = await self._steps.get()
                if (choice := going.get(row)) is None:  # a stop text has ended it
                    continue
                choice.take(token, reason)
                now = time.perf_counter()
                if row in last:
                    self._meters.between_tokens_seconds.observe(now - last[row])
                elif token is not None:
                    self._meters.first_token_seconds.observe(now - self._arrived)
                last[row] = now
                if choice.reason is not None:
                    del going[row]
                    self._model.batcher.leave(row)
                yield choice
        finally:
            self._model.batcher.leave(*going)
            self._meters.tokens.inc(sum(choice.num_tokens for choice in self._choices))

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self._chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model.name}

    @property
    def _usage(self) -> dict[str, int]:
        prompt, generated = self._num_prompt_tokens, sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


async def begin(model: ServedModel, asked: CompletionRequest | ChatRequest) -> Completion:
    """Encode the prompts and submit their rows. Raises Refusal."""
    return Completion(model, asked, [await model.prompt_ids(prompt) for prompt in asked.prompts])


def event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


@lru_cache(maxsize=2**17)
def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as text. If it has an incomplete character, its bytes are spelled: `bytes:\\xc3`."""
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.bytes_of(token))


def completion_logprobs(tokenizer: Tokenizer, scores: Sequence[Score], *, first: Sequence[int]) -> dict[str, Any]:
    """Log probabilities of a completion's tokens. Before them may come the prompt's `first` one, which has none."""
    spell, unknown = partial(spelled, tokenizer), [None] * len(first)
    tops = [
        {spell(token): _finite(logprob) for token, logprob in (*score.top, (score.token, score.logprob))}
        for score in scores
    ]
    return {
        "tokens": [*map(spell, first), *(spell(score.token) for score in scores)],
        "token_logprobs": [*unknown, *(_finite(score.logprob) for score in scores)],
        "top_logprobs": [*unknown, *tops],
    }


def chat_logprobs(tokenizer: Tokenizer, scores: Sequence[Score]) -> dict[str, Any]:
    def told(token: int, logprob: float) -> dict[str, Any]:
        raw = list(tokenizer.bytes_of(token))
        return {"token": spelled(tokenizer, token), "logprob": _finite(logprob), "bytes": raw}

    content = [
        {**told(score.token, score.logprob), "top_logprobs": [told(*one) for one in score.top]} for score in scores
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float | None:
    """None for NaN and infinities, which JSON does not have and damaged models give."""
    return logprob if math.isfinite(logprob) else None
