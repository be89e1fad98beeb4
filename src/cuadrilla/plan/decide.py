"""Decides from the text what a run file leaves open: the size of a step, the length of a sequence, the weight decay.

The rules are for language models, and were measured with `gpt2-micro` on Don Quijote (docs/experiments.md, 2026-11-23).
A run keeps the values that it began with. Pure, but it reads the data's manifest and the run's own configuration.
"""

import math
from contextlib import suppress
from dataclasses import dataclass

from cuadrilla.config import AutoSync, Config, CrewEngine, ExactSync, LanguageTaskSection, LocalEngine, MuonSection
from cuadrilla.data.folder import read_manifest
from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.plan.predict import CREW_STEP
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import has_begun, read_run_config

MIN_EPOCHS = 2.0
"""Weights decay only if the text is read at least this often."""
MEMORY_EPOCHS, OFTEN_READ_TOKENS, MICRO_WEIGHTS = 1.4, 50_000, 786_432
"""With weight decay a weight is an average of its recent updates: each step keeps 1 - rate * decay of it. The best
span of this average, in epochs, is about the same for texts of any size (Wang & Aitchison 2024, arXiv 2405.13698): the
first number. If tokens of the text / readings is below the second number, the best span with `micro` was shorter, by
the square root of the ratio. With `mini`, which has 9.4 times as many weights in its blocks, 0.6 of that span fit both
lengths that were measured: the fourth root of the ratio of the weights."""
MAX_DECAY = 2.0
"""A stronger decay was worse where an epoch has a dozen steps, and hardly better elsewhere."""
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 1_024, 16_384
SHORT_RUN_TOKENS = 3_000_000
"""For runs of up to this many tokens the smallest step is best. For longer ones it grows with the square root."""
SHORT_CONTEXT, SHORT_TOKENS = 128, 3_000_000
"""The longest context of a run of up to this many tokens."""
USUAL_BATCH, USUAL_UNIT = 32, 8
SIZES = ("model.context", "train.batch_sequences", "train.unit_sequences")
DECAY = "optim.weight_decay"
UNITS, STRICT_UNITS, MAX_UNIT = 32, 8, 64
"""Units in a step at least, so that unequal machines can share it (fewer in strict mode, where each unit is a pass);
and sequences in a unit at most."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The value of a setting that the run file leaves open, by its key there, and the reason for it."""

    key: str
    value: int | float
    reason: Message


def decide(config: Config, run: RunDir) -> tuple[Config, list[Decision]]:
    """The complete settings, and the decisions made now: none if the run has begun. Raises ConfigError."""
    if has_begun(run) and run.config.exists():
        return _as_begun(config, read_run_config(run)), []
    if isinstance(config.sync, AutoSync) and not (_has_network(config.engine) and not config.sync.strict):
        config = config.model_copy(update={"sync": ExactSync(strict=config.sync.strict)})
    text = _text_tokens(config, run)
    tokens = config.train.tokens or round(config.train.epochs * text)
    decisions: list[Decision] = []
    ruled = bool(text and tokens) and not config.model.init  # going on from other weights was not measured
    if ruled:
        for rule in (_context, _batch):
            if decision := rule(config, tokens):
                config = _with(config, decision.key, decision.value)
                decisions.append(decision)
    config = _without_gaps(config, ruled=ruled)
    if isinstance(config.optim, MuonSection) and config.optim.weight_decay is None:
        tokens = tokens or config.train.steps * config.train.batch_sequences * config.model.shape[3]
        decision = _decay(config, tokens=tokens, text=0 if config.model.init else text)
        config = _with(config, decision.key, decision.value)
        decisions += [decision] if decision.value else []
    return config, decisions


def _has_network(engine: LocalEngine | CrewEngine) -> bool:
    """Whether the workers of this engine exchange steps over a network."""
    return isinstance(engine, CrewEngine) and (bool(engine.link) or not engine.listen.startswith("127."))


def _as_begun(config: Config, began: Config) -> Config:
    """Fill the gaps with the settings that the run began with."""
    if isinstance(config.sync, AutoSync):
        config = config.model_copy(update={"sync": began.sync})
    for key in SIZES:
        config = _with(config, key, _value(config, key) or _value(began, key))
    if isinstance(config.optim, MuonSection) and config.optim.weight_decay is None:
        config = _with(config, DECAY, getattr(began.optim, "weight_decay", None) or 0.0)
    return config


def weight_decay(epochs: float, *, text: int, weights: int, epoch_steps: float, lr: float) -> float:
    """The best weight decay. `text`: its tokens; `weights`: of the model's blocks; `lr`: the learning rate."""
    if epochs < MIN_EPOCHS:
        return 0.0
    small = (MICRO_WEIGHTS / weights) ** 0.25
    memory = MEMORY_EPOCHS * min(1.0, math.sqrt(text / (epochs * OFTEN_READ_TOKENS)) * small)
    return float(f"{min(1 / (lr * memory * epoch_steps), MAX_DECAY):.2g}")


def step_tokens(tokens: int, *, alone: bool) -> int:
    """The best number of tokens of a step in a run of `tokens` tokens, a power of two."""
    doublings = round(math.log2(max(tokens / SHORT_RUN_TOKENS, 1.0)) / 2)
    return min((MIN_STEP_TOKENS << doublings) * (1 if alone else CREW_STEP), MAX_STEP_TOKENS)


def block_weights(config: Config) -> int:
    """The number of weights in the matrices of the model's blocks."""
    layers, _, width, _ = config.model.shape
    return layers * 12 * width * width


def shared_unit(batch: int, *, strict: bool) -> int:
    """Sequences in a unit: the most that divide the batch into at least `UNITS` units, or 1 for a smaller batch."""
    most = min(max(batch // (STRICT_UNITS if strict else UNITS), 1), MAX_UNIT)
    return next(size for size in range(most, 0, -1) if batch % size == 0)


def _context(config: Config, tokens: int) -> Decision | None:
    """For a short run, a context shorter than the preset's."""
    if config.model.context or config.model.shape[3] <= SHORT_CONTEXT or tokens > SHORT_TOKENS:
        return None
    reason = Message("a run of {tokens:,} tokens", tokens=tokens)
    return Decision(key="model.context", value=SHORT_CONTEXT, reason=reason)


def _batch(config: Config, tokens: int) -> Decision | None:
    if config.train.batch_sequences:
        return None
    alone = isinstance(config.engine, LocalEngine)
    unit, context = config.train.unit_sequences or 1, config.model.shape[3]
    sequences = unit * max(step_tokens(tokens, alone=alone) // (context * unit), 1)
    reason = Message("steps of {step:,} tokens, in a run of {tokens:,}", step=sequences * context, tokens=tokens)
    return Decision(key="train.batch_sequences", value=sequences, reason=reason)


def _decay(config: Config, *, tokens: int, text: int) -> Decision:
    epochs = tokens / text if text else 0.0
    context, weights = config.model.shape[3], block_weights(config)
    steps = text / (config.train.batch_sequences * context)
    decay = weight_decay(epochs, text=text, weights=weights, epoch_steps=steps, lr=config.optim.lr)
    reason = Message("the text is read {epochs:.1f} times, in {steps:,.0f} steps each", epochs=epochs, steps=steps)
    return Decision(key=DECAY, value=decay, reason=reason)


def _without_gaps(config: Config, *, ruled: bool) -> Config:
    """Fill in batch and unit where no rule applies: for other tasks, and for runs whose length is given in steps."""
    batch, unit = config.train.batch_sequences, config.train.unit_sequences
    batch = batch or max(USUAL_BATCH // (unit or 1), 1) * (unit or 1)
    unit = unit or (shared_unit(batch, strict=config.sync.strict) if ruled else math.gcd(batch, USUAL_UNIT))
    return _with(_with(config, "train.batch_sequences", batch), "train.unit_sequences", unit)


def _value(config: Config, key: str) -> float:
    section, _, name = key.partition(".")
    value: float = getattr(getattr(config, section), name)
    return value


def _with(config: Config, key: str, value: float) -> Config:
    section, _, name = key.partition(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})


def _text_tokens(config: Config, run: RunDir) -> int:
    """Tokens of the training text; 0 if the task has no text, or the text is not there."""
    if isinstance(config.task, LanguageTaskSection):
        with suppress(DataError):
            return read_manifest(run.path / config.data.folder).splits["train"].num_tokens
    return 0
