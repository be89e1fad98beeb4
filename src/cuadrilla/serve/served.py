"""The model of a service: how it is opened, run and asked."""

import asyncio
import re
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from cuadrilla.config import LanguageTaskSection
from cuadrilla.errors import ResourceError
from cuadrilla.host.container import Cgroups, read_memory
from cuadrilla.model.rows import Rows
from cuadrilla.runfile import read_run_config
from cuadrilla.serve.batching import Batcher
from cuadrilla.serve.edge import Refusal
from cuadrilla.serve.meters import Meters
from cuadrilla.serve.predictions import Predictor
from cuadrilla.train.trained import LanguageModel, load_trained, open_model, run_of

MAX_SLOTS = 64
PART_OF_MEMORY = 0.25
"""Share of the free memory that KV caches may take if the number of slots is not given."""


@dataclass(eq=False, kw_only=True)
class ServedModel:
    """A language model with its name, and the rows that it continues together. It answers while it is `running`."""

    name: str
    opened: LanguageModel
    batcher: Batcher

    def __post_init__(self) -> None:
        self.meters, self.created = Meters(self.name, self.batcher), int(time.time())

    @property
    def context(self) -> int:
        return self.opened.model.config.context

    def running(self) -> AbstractAsyncContextManager[None]:
        """A block in which it answers, once, in this event loop."""
        return self.batcher.running()

    async def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """A prompt's token ids; an empty one begins a new text. Raises Refusal for too many or unknown tokens."""
        tokenizer, size = self.opened.tokenizer, self.opened.model.config.vocab_size
        ids = await asyncio.to_thread(tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        if ids and max(ids) >= size:
            raise Refusal(400, f"prompt has tokens outside of the vocabulary of {size:,}", param="prompt")
        if len(ids) > self.context:
            template = f"the prompt has {len(ids):,} tokens, the model reads {self.context:,}"
            raise Refusal(400, template, param="prompt", code="context_length_exceeded")
        return ids or [tokenizer.end_of_text]


def open_served(
    path: Path, *, name: str, device: str, precision: str, slots: int, queue: int
) -> ServedModel | Predictor:
    """Open a language model or a user's task. `name` "": that of its folder. `slots` 0: as many as memory allows.
    `queue`: texts that may wait for a slot.

    Raises ResourceError if so many slots do not fit into memory, and what opening it raises.
    """
    name, run = name or _name(path), run_of(path)
    if run is not None and not isinstance(read_run_config(run).task, LanguageTaskSection):
        return Predictor(name, load_trained(run, device=device))
    opened = open_model(path, device=device, precision=precision)
    slots = slots or slots_for(opened)
    try:
        rows = Rows(opened.ready, slots=slots)
    except RuntimeError:  # torch's error when memory runs out
        raise ResourceError(
            "{name}: not enough memory to continue {slots} texts at once",
            name=name,
            slots=slots,
            hint="--slots {fewer}, or a smaller model",
            fewer=max(slots // 2, 1),
        ) from None
    return ServedModel(name=name, opened=opened, batcher=Batcher(rows, max_waiting=queue))


def slots_for(opened: LanguageModel) -> int:
    """The number of slots, at most `MAX_SLOTS`, whose keys and values fit into `PART_OF_MEMORY` of the free memory."""
    config, place = opened.model.config, next(opened.model.parameters()).device
    each = 2 * config.layers * config.context * config.width * 4
    used, most = read_memory(Cgroups())
    free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else most - used
    return int(min(MAX_SLOTS, max(1, free * PART_OF_MEMORY // each)))


def _name(path: Path) -> str:
    folder = path.resolve()
    return re.sub(r"[^\w.-]+", "-", (folder.parent if folder.is_file() else folder).name)[:64] or "model"
