"""Answers as OpenAI's API has them: choices that grow piece by piece, and what is told of each token."""

import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.model.generate import REPLACEMENT, TextStream, whole_characters
from cuadrilla.model.rows import Reason, Score
from cuadrilla.serve.batching import Call

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Piece:
    """The text that is certain now, the scores of the tokens that came, and at the end why."""

    text: str
    scores: tuple[Score, ...] = ()
    reason: Reason | None = None


@dataclass(eq=False)
class Continuation:
    """One choice while its row goes on. Iterate once; a stop string ends it, and its row."""

    call: Call
    index: int
    tokenizer: Tokenizer
    stop: Sequence[str]
    num_tokens: int = field(init=False, default=0)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        stream = TextStream(self.tokenizer, stop=self.stop)
        try:
            async for step in self.call:
                text, scores = "", self._scores(step.token)
                if step.token is not None:
                    text = stream.push(step.token)
                reason = step.reason
                if reason is not None:
                    text += stream.finish()
                if stream.stopped:
                    reason = "stop"
                yield Piece(text, scores, reason)
                if reason is not None:
                    return
        finally:
            self.call.cancel()

    def _scores(self, token: int | None) -> tuple[Score, ...]:
        """Of the newest token, which is counted."""
        if token is None:
            return ()
        self.num_tokens += 1
        row = self.call.row
        return (row.scores[self.num_tokens - 1],) if row.num_top is not None else ()


class Spelling:
    """Tokens as texts, and where in the whole text each begins. One that ends within a character is `bytes:\\xc3`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = whole_characters()
        self._offset = 0

    def spell(self, token: int) -> str:
        return _spelled(self._tokenizer, token)

    def bytes_of(self, token: int) -> list[int]:
        return list(self._tokenizer.bytes_of(token))

    def place(self, token: int) -> int:
        """The character at which the next token, this one, begins."""
        begins = self._offset
        self._offset += len(self._decoder.decode(self._tokenizer.bytes_of(token)))
        return begins


@lru_cache(maxsize=2**17)
def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """An answer may name millions of tokens, and few different ones."""
    text = tokenizer.decode([token])
    if REPLACEMENT not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.bytes_of(token))


def completion_logprobs(spelling: Spelling, scores: Sequence[Score], *, first: int | None = None) -> dict[str, Any]:
    """Of a completion's tokens; before them, of a prompt, its `first` one, of which nothing is known."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    if first is not None:
        found = {
            "tokens": [spelling.spell(first)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [spelling.place(first)],
        }
    for score in scores:
        found["tokens"].append(spelling.spell(score.token))
        found["token_logprobs"].append(_finite(score.logprob))
        top = {spelling.spell(token): _finite(logprob) for token, logprob in score.top}
        found["top_logprobs"].append({**top, spelling.spell(score.token): _finite(score.logprob)})
        found["text_offset"].append(spelling.place(score.token))
    return found


def chat_logprobs(spelling: Spelling, scores: Sequence[Score]) -> dict[str, Any]:
    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.spell(token), "logprob": _finite(logprob), "bytes": spelling.bytes_of(token)}

    return {
        "content": [
            {**told(score.token, score.logprob), "top_logprobs": [told(*one) for one in score.top]} for score in scores
        ],
        "refusal": None,
    }


def _finite(logprob: float) -> float | None:
    """JSON has no other numbers; a model that is broken has."""
    return logprob if math.isfinite(logprob) else None


def usage(*, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(value: Any) -> str:
    """One of a stream of server-sent events."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
