"""The models of a service: what each is called, and how it is asked."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import psutil
from torch import nn

from cuadrilla.config import LanguageTaskSection
from cuadrilla.data.cuentos import stories
from cuadrilla.data.shards import MANIFEST
from cuadrilla.errors import ConfigError, ResourceError
from cuadrilla.home import Home
from cuadrilla.messages import Message
from cuadrilla.model.generate import for_inference
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.rows import Row
from cuadrilla.model.sampling import Sampling
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_config
from cuadrilla.serve.batching import Batcher, Busyness, trial
from cuadrilla.serve.edge import Refusal
from cuadrilla.serve.predictions import Predictor, Predictors
from cuadrilla.train.eval_data import held_out_texts
from cuadrilla.train.inference import bits_per_byte_of, choose_for_inference
from cuadrilla.train.trained import LanguageModel, load_trained, open_model, run_of

MOST_SLOTS = 64
PART_OF_MEMORY = 0.25
"""For keys and values, where the number of slots is left open."""
SLOTS_OF_ONE_WAITING = 16
PREFIX_BYTES = 256 * 2**20
NAME = re.compile(r"[\w.-]{1,64}")
INT8_LETTERS = 20_000
"""Of a text on which the loss of int8 is measured."""
LONG_TEXT = 20_000
"""Characters that are encoded beside the event loop."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """How many sequences a model continues together (0: as memory allows) and how many more may wait.

    `waiting` -1: one for `SLOTS_OF_ONE_WAITING` slots. More would not keep the slots fuller when too many come, and
    each makes whoever is admitted wait longer: with 16 slots, by a sixteenth of the time that a text takes.
    """

    slots: int = 0
    waiting: int = -1
    prefix_bytes: int = PREFIX_BYTES


@dataclass(eq=False, kw_only=True)
class ServedModel:
    """A language model under its name. `start` and `close` in the event loop."""

    name: str
    opened: LanguageModel
    ready: GPT2
    """As `for_inference` gives it."""
    computes: str
    """With which kernels, or what int8 costs."""
    room: Room
    created: int = field(default_factory=lambda: int(time.time()))
    tokens_per_second: float = 0.0
    """Of one stream, measured at the start."""
    _batcher: Batcher | None = field(init=False, default=None)

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
        slots = self.room.slots or slots_for(self.opened)
        waiting = max(1, slots // SLOTS_OF_ONE_WAITING) if self.room.waiting < 0 else self.room.waiting
        batcher = Batcher(self.ready, slots=slots, most_waiting=waiting, prefix_bytes=self.room.prefix_bytes)
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

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()

    async def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """An empty prompt begins a new text. Raises Refusal for one that is too long or has unknown tokens."""
        tokenizer = self.opened.tokenizer
        if isinstance(prompt, str):
            beside = len(prompt) > LONG_TEXT
            ids = await asyncio.to_thread(tokenizer.encode, prompt) if beside else tokenizer.encode(prompt)
        else:
            ids = prompt
            if ids and max(ids) >= (size := self.opened.model.config.vocab_size):
                raise Refusal(422, f"prompt has tokens outside of the vocabulary of {size:,}", param="prompt")
        if len(ids) > self.context:
            raise Refusal(
                422,
                f"the prompt has {len(ids):,} tokens, the model reads {self.context:,}",
                param="prompt",
                code="context_length_exceeded",
            )
        return ids or [tokenizer.end_of_text]

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
    given: Sequence[str], *, device: str, newest: bool, precision: str, int8: bool, room: Room
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
            ready, computes = _made_ready(opened, run, int8=int8)
            models.append(ServedModel(name=name, opened=opened, ready=ready, computes=computes, room=room))
    return models, Predictors(predictors)


def hold(model: nn.Module) -> None:
    """Weights that are mapped from their file change with it, and end the process (SIGBUS) when it becomes shorter."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _made_ready(opened: LanguageModel, run: RunDir | None, *, int8: bool) -> tuple[GPT2, str]:
    """What generates, and how it computes. Raises DeviceError for int8 where it is not multiplied in hardware."""
    choice = choose_for_inference(opened.model, home=Home.of_user().path)
    ready = for_inference(opened.model, kernels=choice.kernels)
    if not int8:
        return ready, Message("kernels {choice}", choice=choice)
    rounded = for_inference(opened.model, int8=True)
    text, name = _some_text(opened, run)
    before, after = (bits_per_byte_of(model, opened.tokenizer, text) for model in (ready, rounded))
    return rounded, Message(
        "int8 weights: {after:.4f} bits/byte, {before:.4f} without them, on {bytes:,} bytes of {name}",
        after=after,
        before=before,
        bytes=len(text.encode()),
        name=name,
    )


def _some_text(opened: LanguageModel, run: RunDir | None) -> tuple[str, str]:
    """Of the run's held-out text, if its data is here, else built-in stories."""
    folder = run.path / read_run_config(run).data.folder if run is not None else None
    if folder is not None and (folder / MANIFEST).is_file():
        found, name = "\n".join(islice(held_out_texts(folder, opened.tokenizer), 100)), Message("held-out text")
    else:
        found, name = "\n".join(stories(50)), Message("built-in stories")
    return found[:INT8_LETTERS], name


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
