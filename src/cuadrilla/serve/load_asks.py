"""What a load test asks, and when: arrivals at random, lengths from a distribution, prompts of which none is repeated.

Everything follows from a seed: the same seed asks the same in the same order, whatever the server does.

Invariants
* Arrivals are those of a Poisson process: the times between them are exponential and do not depend on one another.
* A prompt of the built-in stories starts at a word drawn at random, so that a cache of earlier prompts seldom helps.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from cuadrilla.data.cuentos import stories
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import finite_json, read_regular

MOST_LENGTH = 1_000_000
LONG_TAIL = 10
"""A lognormal length is at most this many times its median, unless a limit is given."""
NUM_STORIES = 600
STORY_SEED = 77
MOST_PROMPT_BYTES = 100 * 2**20
LENGTHS_HINT = "64, or 32:256 (uniform), or lognormal:64:0.8 (median and sigma), or lognormal:64:0.8:512 (at most 512)"


# -- when --------------------------------------------------------------------------------------------------------------


def arrivals(rate: float, *, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive, without end: `rate` a second on average.

    Each rate has its own draw, so that one with few arrivals by chance does not flatter a whole sweep.
    """
    dice = random.Random(f"arrivals {seed} {rate:g}")
    now = 0.0
    while True:
        now += dice.expovariate(rate)
        yield now


# -- how long ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of prompts or answers, in tokens: `fixed` (always `low`), `uniform` or `lognormal`."""

    kind: str
    low: int = 1
    high: int = 1
    median: float = 1.0
    sigma: float = 0.0

    def draw(self, dice: random.Random) -> int:
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return dice.randint(self.low, self.high)
        drawn = round(self.median * dice.lognormvariate(0.0, self.sigma))
        return min(max(drawn, 1), self.high)


def parse_lengths(text: str, *, option: str) -> Lengths:
    """Of `64`, `32:256`, `lognormal:64:0.8` or `lognormal:64:0.8:512`. Raises ConfigError."""
    found = _read_lengths(text)
    if found is None:
        raise ConfigError("{option} {text!r} is no length", option=option, text=text, hint=LENGTHS_HINT)
    return found


def _read_lengths(text: str) -> Lengths | None:
    kind, *numbers = text.split(":")
    try:
        if kind == "lognormal" and len(numbers) in (2, 3):
            median, sigma = float(numbers[0]), float(numbers[1])
            if not (1 <= median <= MOST_LENGTH and 0 <= sigma <= 5):
                return None
            most = int(numbers[2]) if len(numbers) == 3 else round(LONG_TAIL * median)
            return Lengths(kind=kind, high=most, median=median, sigma=sigma) if 1 <= most <= 10 * MOST_LENGTH else None
        ends = [int(number) for number in (kind, *numbers)]
    except ValueError:
        return None
    if len(ends) > 2 or not 1 <= ends[0] <= ends[-1] <= MOST_LENGTH:
        return None
    return Lengths(kind="fixed" if len(ends) == 1 else "uniform", low=ends[0], high=ends[-1])


# -- what --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadAsk:
    """A request: its body, and how many tokens it allows (0: not said)."""

    number: int
    body: bytes
    most_tokens: int


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One of a user's file; `most_tokens` None: as the command says."""

    text: str
    most_tokens: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """One a line; lines of JSON objects have `prompt` and perhaps `max_tokens`. Raises ConfigError."""
    lines = [line for line in _read_text(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError("{path} has no prompt", path=path, hint="one prompt a line, or JSON lines with `prompt`")
    return [_read_prompt(line, place=f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def _read_prompt(line: str, *, place: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(text=line)
    try:
        value = finite_json(line)
    except (ValueError, RecursionError):
        value = None
    most = value.get("max_tokens") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str) or not _is_count(most):
        hint = 'a line of JSON is like {"prompt": "Había una vez", "max_tokens": 64}'
        raise ConfigError("{place} is no prompt", place=place, hint=hint)
    return Prompt(text=value["prompt"], most_tokens=most)


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and 1 <= value <= MOST_LENGTH)


def read_bodies(path: Path) -> list[bytes]:
    """Bodies for `/v1/predict`: a file of JSON, or one of JSON lines. Raises ConfigError."""
    text = _read_text(path)
    for bodies in ([text], [line for line in text.splitlines() if line.strip()]):
        if bodies and all(map(_is_json, bodies)):
            return [body.encode() for body in bodies]
    hint = "what is to be sent to /v1/predict: a JSON value, or one a line"
    raise ConfigError("{path} is not JSON", path=path, hint=hint)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, most_bytes=MOST_PROMPT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        hint = "name a text file in UTF-8"
        raise ConfigError("cannot read {path}: {reason}", path=path, reason=reason, hint=hint) from None


class StoryText:
    """Spanish of any length, from the built-in stories."""

    def __init__(self) -> None:
        self._text = "\n\n".join(stories(NUM_STORIES, seed=STORY_SEED))
        self._starts = [0, *(at + 1 for at, letter in enumerate(self._text) if letter in " \n")]

    def piece(self, characters: int, dice: random.Random) -> str:
        """About that many characters, from a word's first letter on; a whole last word."""
        start = self._starts[dice.randrange(len(self._starts))]
        text = self._text[start : start + characters]
        while len(text) < characters:
            text += " " + self._text[: characters - len(text)]
        return text.rsplit(maxsplit=1)[0] if " " in text.strip() and len(text) > 20 else text


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How requests are made. `bodies`: those of `/v1/predict`, in turn, and then nothing else counts."""

    model: str = ""
    is_chat: bool = False
    prompts: Sequence[Prompt] = ()
    prompt_tokens: Lengths = field(default_factory=lambda: Lengths(kind="uniform", low=32, high=128))
    max_tokens: Lengths = field(default_factory=lambda: Lengths(kind="fixed", low=64))
    characters_per_token: float = 4.0
    temperature: float = 1.0
    asks_usage: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    bodies: Sequence[bytes] = ()
    seed: int = 0

    def one(self, prompt: str, *, number: int, most_tokens: int) -> LoadAsk:
        """A request that streams its answer, as OpenAI's API has it."""
        text: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        )
        body = {"model": self.model, **text, "max_tokens": most_tokens, "temperature": self.temperature, "stream": True}
        if self.temperature > 0:
            body["seed"] = self.seed + number
        if self.asks_usage:
            body["stream_options"] = {"include_usage": True}
        raw = json.dumps(body | dict(self.fields), ensure_ascii=False).encode(errors="replace")
        return LoadAsk(number=number, body=raw, most_tokens=most_tokens)


def asks(asking: Asking, *, stage: int, text: StoryText | None = None) -> Iterator[LoadAsk]:
    """Requests without end, other ones in each stage."""
    if asking.bodies:
        for number in count():
            yield LoadAsk(number=number, body=asking.bodies[number % len(asking.bodies)], most_tokens=0)
    dice = random.Random(f"asks {asking.seed} {stage}")
    text = text or StoryText()
    for number in count():
        most = asking.max_tokens.draw(dice)
        if asking.prompts:
            prompt = asking.prompts[number % len(asking.prompts)]
            yield asking.one(prompt.text, number=number, most_tokens=prompt.most_tokens or most)
        else:
            characters = round(asking.prompt_tokens.draw(dice) * asking.characters_per_token)
            yield asking.one(text.piece(max(characters, 1), dice), number=number, most_tokens=most)
