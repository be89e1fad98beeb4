"""Continue prompts with a GPT-2: as token ids, as text, or many prompts at once (`rows.py`).

A stop id or a stop string is not part of the output. The pieces of text together are the decoded text: a character of
several tokens is held back until it is complete, and so is text that may begin a stop string.
"""

import codecs
from collections import deque
from collections.abc import Generator, Iterator, Sequence
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
    yield from _continued(model, [row])
    assert row.reason is not None
    return row.reason


def generate_batch(model: GPT2 | InferenceModel, prompts: list[list[int]], *, sampling: Sampling) -> list[list[int]]:
    """Continue many prompts together. Prompt i is continued as by `generate` with the seed `sampling.seed + i`."""
    rows = [Row(list(prompt), replace(sampling, seed=sampling.seed + number)) for number, prompt in enumerate(prompts)]
    deque(_continued(model, rows), maxlen=0)
    return [row.generated for row in rows]


def _continued(model: GPT2 | InferenceModel, all_rows: Sequence[Row]) -> Iterator[int]:
    """Continue all rows to their ends. Yields their tokens as they come. Raises CheckpointError."""
    waiting = deque(row for row in all_rows if row.reason is None)
    if not waiting:
        return
    ready = model if isinstance(model, InferenceModel) else InferenceModel(model)
    rows = Rows(ready, slots=min(len(waiting), MAX_ROWS))
    while waiting or len(rows):
        while waiting and rows.free:
            rows.join(waiting.popleft())
        yield from (token for _, token in rows.step() if token is not None)
    if any(row.reason == "error" for row in all_rows):
        raise CheckpointError(
            "the model computes NaN or infinite values",
            hint="use another checkpoint: this one may have been damaged in training",
        )


def generate_text(
    model: GPT2 | InferenceModel, tokenizer: Tokenizer, prompt: str, *, sampling: Sampling
) -> Iterator[str]:
    """Continue a text. Yields pieces. The end-of-text token is a stop id, too. An empty prompt begins a document."""
    stream = TextStream(tokenizer, stop=sampling.stop)
    own = replace(sampling, stop=(), stop_ids=(*sampling.stop_ids, tokenizer.end_of_text))
    for token in generate(model, tokenizer.encode(prompt) or [tokenizer.end_of_text], sampling=own):
        if piece := stream.push(token):
            yield piece
        if stream.stopped:
            return
    if piece := stream.finish():
        yield piece


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
