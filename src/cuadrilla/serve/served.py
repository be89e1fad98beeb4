"""The models of a service: what each is called, and how it is asked."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
from torch import nn

from cuadrilla.config import LanguageTaskSection
from cuadrilla.errors import ConfigError, ResourceError
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.rows import Row
from cuadrilla.model.sampling import Sampling
from cuadrilla.runfile import read_run_config
from cuadrilla.serve.batching import Batcher, Busyness, trial
from cuadrilla.serve.edge import Refusal
from cuadrilla.serve.predictions import Predictor, Predictors
from cuadrilla.train.trained import LanguageModel, load_trained, open_model, run_of

MOST_SLOTS = 64
PART_OF_MEMORY = 0.25
"""For keys and values, where the number of slots is left open."""
SLOTS_OF_ONE_WAITING = 16
NAME = re.compile(r"[\w.-]{1,64}")
LONG_TEXT = 5_000
"""Characters that are encoded beside the event loop."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Room:
    """How many sequences a model continues together (0: as memory allows) and how many more may wait.

    `waiting` -1: one for `SLOTS_OF_ONE_WAITING` slots. More would not keep the slots fuller when too many come, and
    each makes whoever is admitted wait longer: with 16 slots, by a sixteenth of the time that a text takes.
    """

    slots: int = 0
    waiting: int = -1


@dataclass(eq=False, kw_only=True)
class ServedModel:
    """A language model under its name. `start` and `close` in the event loop."""

    name: str
    opened: LanguageModel
    ready: InferenceModel
    room: Room
    created: int = field(default_factory=lambda: int(time.time()))
    tokens_per_second: float = 0.0
    """Of one stream, measured at the start."""
    _batcher: Batcher | None = field(init=False, default=None)
    _encoding: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    """One long text after the other: several at once take processors from the callers, and memory for good."""

    @property
    def batcher(self) -> Batcher:
        """Raises Refusal before the model is ready."""
        if self._batcher is None:
            raise Refusal(503, "the model is not ready yet", code="loading", wait_seconds=1)
        return self._batcher

    def busyness(self) -> Busyness:
        return self.batcher.load

    @property
    def context(self) -> int:
        return self.opened.model.config.context

    async def start(self) -> None:
        """Raises ResourceError where memory is too small for its slots."""
        _ = self.opened.tokenizer.longest_token  # looks at all tokens, once
        slots = self.room.slots or slots_for(self.opened)
        waiting = max(1, slots // SLOTS_OF_ONE_WAITING) if self.room.waiting < 0 else self.room.waiting
        batcher = Batcher(self.ready, slots=slots, most_waiting=waiting)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(batcher.close)
            with suppress(Refusal):  # its thread has ended already
                self.tokens_per_second = await trial(batcher, token=self.opened.tokenizer.end_of_text)
            if not batcher.works:
                raise ResourceError(
                    "{name}: there is no room for {slots} texts together",
                    name=self.name,
                    slots=slots,
                    hint="--slots {fewer}, or a smaller model",
                    fewer=max(slots // 2, 1),
                )
            stack.pop_all()
        self._batcher = batcher

    def end(self) -> None:
        """Its calls end with the reason `error`."""
        if self._batcher is not None:
            self._batcher.end()

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()

    async def beside(self, work: Callable[[], T]) -> T:
        """The result of `work` on a long text, done outside of the event loop, one after the other."""
        async with self._encoding:
            return await asyncio.to_thread(work)

    async def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """An empty prompt begins a new text. Raises Refusal for one that is too long or has unknown tokens."""
        tokenizer = self.opened.tokenizer
        if isinstance(prompt, str):
            least = len(prompt.encode()) // tokenizer.longest_token
            if least > self.context:
                raise self._too_long(f"at least {least:,}")
            is_long = len(prompt) > LONG_TEXT
            ids = await self.beside(partial(tokenizer.encode, prompt)) if is_long else tokenizer.encode(prompt)
        else:
            ids = prompt
            if ids and max(ids) >= (size := self.opened.model.config.vocab_size):
                raise Refusal(422, f"prompt has tokens outside of the vocabulary of {size:,}", param="prompt")
        if len(ids) > self.context:
            raise self._too_long(f"{len(ids):,}")
        return ids or [tokenizer.end_of_text]

    def _too_long(self, tokens: str) -> Refusal:
        told = f"the prompt has {tokens} tokens, the model reads {self.context:,}"
        return Refusal(422, told, param="prompt", code="context_length_exceeded")

    def rows(
        self, ids: Sequence[int], sampling: Sampling, *, num: int, num_top: int | None, scores_prompt: bool
    ) -> list[Row]:
        """So many continuations of one prompt, within the context; the seed of each is one more than the last one's."""
        most = min(sampling.max_tokens, self.context - len(ids))
        return [
            Row(
                list(ids),
                replace(sampling, stop=(), max_tokens=most, seed=sampling.seed + number),
                num_top=num_top,
                scores_prompt=scores_prompt,
            )
            for number in range(num)
        ]


@dataclass(frozen=True)
class Models:
    """By name; the first one is meant where none is named."""

    by_name: Mapping[str, ServedModel]

    def find(self, name: str | None) -> ServedModel:
        """Raises Refusal for one that is not here."""
        if not self.by_name:
            raise Refusal(404, "this service has no language model: ask /v1/predict", code="model_not_found")
        if name is None:
            return next(iter(self.by_name.values()))
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            raise Refusal(404, f"there is no such model; here: {known}", param="model", code="model_not_found")
        return self.by_name[name]


def slots_for(opened: LanguageModel) -> int:
    """As many as `PART_OF_MEMORY` of what is free holds the keys and values of."""
    config = opened.model.config
    each = 2 * config.layers * config.context * config.width * 4
    return int(min(MOST_SLOTS, max(1, psutil.virtual_memory().available * PART_OF_MEMORY // each)))


def open_served(
    given: Sequence[str], *, device: str, newest: bool, precision: str, room: Room
) -> tuple[list[ServedModel], Predictors]:
    """Language models and tasks of one's own, each by its folder or as NAME=FOLDER.

    Raises ConfigError where two have one name, and what opening them raises.
    """
    models, predictors = [], {}
    for name, path in _named(given):
        run = run_of(path)
        if run is not None and not isinstance(read_run_config(run).task, LanguageTaskSection):
            predictors[name] = Predictor(name, load_trained(run, device=device, newest=newest))
        else:
            opened = open_model(path, device=device, newest=newest, precision=precision)
            hold(opened.model)
            models.append(ServedModel(name=name, opened=opened, ready=InferenceModel(opened.model), room=room))
    return models, Predictors(predictors)


def hold(model: nn.Module) -> None:
    """Weights that are mapped from their file change with it, and end the process (SIGBUS) when it becomes shorter."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _named(given: Sequence[str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for one in given:
        name, _, rest = one.partition("=")
        named = bool(rest) and not Path(one).exists()
        path = Path(rest if named else one)
        name = name if named else _name(path)
        if not NAME.fullmatch(name):
            hint = "use letters, digits, dots, - and _: NAME=FOLDER"
            raise ConfigError("{name!r} cannot name a model", name=name, hint=hint)
        if name in dict(found):
            raise ConfigError("two models are called {name}", name=name, hint="name one of them: NAME=FOLDER")
        found.append((name, path))
    return found


def _name(path: Path) -> str:
    """Of its folder."""
    folder = path.resolve()
    return re.sub(r"[^\w.-]+", "-", (folder.parent if folder.is_file() else folder).name)[:64] or "model"
