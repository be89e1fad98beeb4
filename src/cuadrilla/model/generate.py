"""Continue prompts with a GPT-2: as token ids, as text, or many prompts at once (`rows.py`).

A stop id or a stop string is not part of the output. The pieces of text together are the decoded text: a character of
several tokens is held back until it is complete, and so is text that may begin a stop string.
"""

import codecs
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.rows import Reason, Row, Rows
from cuadrilla.model.sampling import Sampling

MAX_ROWS = 64
"""Upper bound of the rows that are continued together. More rows take more memory and are hardly faster."""


def generate(
    model: GPT2 | InferenceModel, prompt_ids: list[int], *, sampling: Sampling
) -> Generator[int, None, Reason]:
    """Continue a prompt. Yields token ids, returns why it ended. Stop strings need text: see `generate_text`.

    Raises CheckpointError if the model computes NaN or infinite values.
    """
    row = Row(list(prompt_ids), sampling)
    if row.reason is None:
        rows = _rows_for(model, [row])
        rows.join(row)
    while row.reason is None:
        for _, token in rows.step():
            if token is not None:
                yield token
    _check(row)
    return row.reason


def generate_batch(model: GPT2 | InferenceModel, prompts: list[list[int]], *, sampling: Sampling) -> list[list[int]]:
    """Continue many prompts together. Prompt i is continued as by `generate` with the seed `sampling.seed + i`."""
    all_rows = [
        Row(list(prompt), replace(sampling, seed=sampling.seed + number)) for number, prompt in enumerate(prompts)
    ]
    waiting = deque(row for row in all_rows if row.reason is None)
    if waiting:
        rows = _rows_for(model, all_rows)
        while waiting or len(rows):
            while waiting and rows.free:
                rows.join(waiting.popleft())
            rows.step()
    for row in all_rows:
        _check(row)
    return [row.generated for row in all_rows]


def _check(row: Row) -> None:
    if row.reason == "error":
        raise CheckpointError(
            "the model computes NaN or infinite values",
            hint="use another checkpoint: this one may have been damaged in training",
        )


def _rows_for(model: GPT2 | InferenceModel, all_rows: Sequence[Row]) -> Rows:
    longest = max(len(row.tokens) + row.sampling.max_tokens for row in all_rows)
    ready = model if isinstance(model, InferenceModel) else InferenceModel(model)
    return Rows(ready, slots=min(len(all_rows), MAX_ROWS), capacity=longest)


def generate_text(
    model: GPT2 | InferenceModel, tokenizer: Tokenizer, prompt: str, *, sampling: Sampling
) -> Generator[str, None, Reason]:
    """Continue a text. Yields pieces, returns why it ended: the end-of-text token is a stop id, too. An empty prompt
    begins a new document."""
    stop_ids = (*sampling.stop_ids, tokenizer.end_of_text)
    stream = TextStream(tokenizer, stop=sampling.stop)
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    ids = generate(model, prompt_ids, sampling=replace(sampling, stop=(), stop_ids=stop_ids))
    reason: Reason = "length"
    while not stream.stopped:
        try:
            piece = stream.push(next(ids))
        except StopIteration as end:
            reason = end.value
            break
        if piece:
            yield piece
    piece = stream.finish()
    if piece:
        yield piece
    return "stop" if stream.stopped else reason


class TextStream:
    """Turns token ids into text as they arrive. Push no more ids once `stopped` is true."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back an incomplete character
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token, and return the text that is now certain, often ""."""
        self._held += self._decoder.decode(self._tokenizer.bytes_of(token))
        return self._release(final=False)

    def finish(self) -> str:
        """Return the text that was held back."""
        if not self.stopped:
            self._held += self._decoder.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        found = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if self.stopped or found:
            ready = self._held[: min(found)] if found else ""
            self._held, self.stopped = "", True
            return ready
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
