"""Answers to completion requests: the text of continued rows, whole or in pieces, in the form of OpenAI's API."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.model.generate import TextStream
from cuadrilla.model.rows import Reason, Row, Score
from cuadrilla.serve.openai import ChatRequest, CompletionRequest
from cuadrilla.serve.served import ServedModel

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Piece:
    """Text that is now certain, the scores of the new tokens, and, in the last piece, the reason of the end."""

    text: str
    scores: Sequence[Score] = ()
    reason: Reason | None = None


class Continuation:
    """The text of one row while it grows. A stop text ends it, too."""

    def __init__(
        self, row: Row, *, index: int, prompt: Sequence[int], stream: TextStream, tokenizer: Tokenizer, chat: bool
    ) -> None:
        self.row, self._index, self._stream, self._chat = row, index, stream, chat
        self._tokenizer, self._prompt = tokenizer, prompt
        self.num_tokens = 0
        self.begun = False
        """A first piece has been sent."""

    def take(self, token: int | None, reason: Reason | None) -> Piece:
        text, scores = "", self.row.scores[self.num_tokens : self.num_tokens + 1] if token is not None else []
        if token is not None:
            self.num_tokens += 1
            text = self._stream.push(token)
        if reason is not None:
            text += self._stream.finish()
        return Piece(text, scores, "stop" if self._stream.stopped else reason)

    def chunk(self, piece: Piece, *, echo: bool = False) -> dict[str, Any]:
        """A piece in the form of a stream. With `echo` the first piece begins with the prompt."""
        first, self.begun = not self.begun, True
        echoes = echo and first
        with_scores = self.row.num_top is not None
        if self._chat:
            told: dict[str, Any] = {"delta": {**({"role": "assistant"} if first else {}), "content": piece.text}}
            scored = chat_logprobs(self._tokenizer, piece.scores) if with_scores else None
        else:
            told = {"text": (self._tokenizer.decode(self._prompt) if echoes else "") + piece.text}
            scores = [*(self.row.prompt_scores if echoes else ()), *piece.scores]
            scored = completion_logprobs(self._tokenizer, scores, first=self._prompt[:echoes]) if with_scores else None
        return {"index": self._index, **told, "logprobs": scored, "finish_reason": piece.reason}

    def whole(self, pieces: Sequence[Piece], *, echo: bool) -> dict[str, Any]:
        scores = [score for piece in pieces for score in piece.scores]
        told = self.chunk(Piece("".join(piece.text for piece in pieces), scores, pieces[-1].reason), echo=echo)
        if self._chat:
            told["message"] = {**told.pop("delta"), "refusal": None}
        return told


class Completion:
    """The answer of one model to one call. Make it with `begin`."""

    def __init__(
        self, model: ServedModel, asked: CompletionRequest | ChatRequest, prompts: Sequence[list[int]]
    ) -> None:
        """Submits the rows, which then wait for slots. Raises Refusal."""
        self._model, self._asked, self._meters = model, asked, model.meters
        self._chat = isinstance(asked, ChatRequest)
        tokenizer, num = model.opened.tokenizer, asked.n or 1
        sampling = asked.sampling(max_tokens=asked.tokens_at_most(model.context), end_of_text=tokenizer.end_of_text)
        scores_prompt = asked.echo and asked.num_top is not None
        given = [(prompt, number) for prompt in prompts for number in range(num)]
        rows = [
            model.row(prompt, sampling, number=number, num_top=asked.num_top, scores_prompt=scores_prompt)
            for prompt, number in given
        ]
        self._call = model.batcher.submit(rows)
        self._choices = [
            Continuation(
                row, index=index, prompt=prompt, tokenizer=tokenizer, chat=self._chat,
                stream=TextStream(tokenizer, stop=sampling.stop),
            )
            for index, (row, (prompt, _)) in enumerate(zip(rows, given, strict=True))
        ]  # fmt: skip
        self._num_prompt_tokens = sum(map(len, prompts))
        self._meters.prompt_tokens.inc(self._num_prompt_tokens)
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    async def whole(self) -> bytes:
        """The answer in one piece. Another thread encodes it, because it may name millions of tokens."""
        found: dict[Continuation, list[Piece]] = {choice: [] for choice in self._choices}
        async for choice, piece in self._pieces():
            found[choice].append(piece)

        def put_together() -> bytes:
            choices = [choice.whole(pieces, echo=self._asked.echo) for choice, pieces in found.items()]
            return json.dumps(self._head(chunk=False) | {"choices": choices, "usage": self._usage}).encode()

        return await asyncio.to_thread(put_together)

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        with_usage = self._asked.stream_options is not None and self._asked.stream_options.include_usage
        nothing = {"usage": None} if with_usage else {}
        async with aclosing(self._pieces()) as pieces:  # its rows leave at once if the caller does
            async for choice, piece in pieces:
                if piece.text or piece.scores or piece.reason or not choice.begun:
                    told = choice.chunk(piece, echo=self._asked.echo)
                    yield event({**self._head(chunk=True), "choices": [told], **nothing})
        if with_usage:
            yield event({**self._head(chunk=True), "choices": [], "usage": self._usage})
        yield DONE

    async def _pieces(self) -> AsyncGenerator[tuple[Continuation, Piece], None]:
        """Pieces of all choices, as they come; their times are measured. If reading stops, rows give up their slots."""
        going, last = {choice.row: choice for choice in self._choices}, dict[Row, float]()
        try:
            while going:
                row, token, reason = await self._call.steps.get()
                if (choice := going.get(row)) is None:  # a stop text has ended it
                    continue
                piece, now = choice.take(token, reason), time.perf_counter()
                if row in last:
                    self._meters.between_tokens_seconds.observe(now - last[row])
                elif token is not None:
                    self._meters.first_token_seconds.observe(now - self._call.arrived)
                last[row] = now
                if piece.reason is not None:
                    del going[row]
                    self._model.batcher.leave(row)
                yield choice, piece
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
