"""What may be asked of a preparation, and the part of it that decides the bytes."""

from dataclasses import dataclass
from pathlib import Path

from cuadrilla.data import duplicates
from cuadrilla.data.chunks import key_of
from cuadrilla.data.corpus import AUTO, VAL_BY
from cuadrilla.data.executor import check_processes
from cuadrilla.data.filters import BOOKS, FILTERS
from cuadrilla.data.formats.record import Reading
from cuadrilla.data.shards import Option
from cuadrilla.data.sources import AS_USUAL, Sources
from cuadrilla.data.tokenizer import MAX_VOCAB, MIN_VOCAB, Tokenizer
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message

RECIPE = 5
"""Raised when the same inputs and options would give other bytes; part of the options in a manifest."""
DEFAULT_VOCAB = 8192
DEFAULT_VAL_FRACTION = 0.05


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What may be asked of a preparation. Raises ConfigError for a value out of range."""

    vocab: int | None = None
    """Tokens of the vocabulary to train (None: 8192). Excludes `tokenizer`."""
    tokenizer: Path | None = None
    """Use this `tokenizer.json` instead of training one."""
    val_fraction: float = DEFAULT_VAL_FRACTION
    val_by: str = AUTO
    """What is held out: whole texts (`source`), parts of them (`document`), or the first where there are enough."""
    val: tuple[str, ...] = ()
    """Files and folders to hold out instead."""
    reading: Reading = AS_USUAL
    """How records are read."""
    filter: str = BOOKS
    """One of `filters.FILTERS`."""
    near_duplicates: float = duplicates.DEFAULT_SIMILARITY
    """Similarity from which a document repeats an earlier one; 0 keeps all but equal ones."""
    force: bool = False
    """Replace a folder that was prepared from other inputs."""
    processes: int | None = None
    """None: one for each core."""

    def __post_init__(self) -> None:
        if self.vocab is not None and self.tokenizer is not None:
            raise ConfigError("--vocab and --tokenizer exclude each other", hint="a given tokenizer has its own size")
        if self.vocab is not None and not MIN_VOCAB <= self.vocab <= MAX_VOCAB:
            hint = Message(
                "from {least} (the 256 bytes and the end of a text) to {most:,}", least=MIN_VOCAB, most=MAX_VOCAB
            )
            raise _out_of_range("--vocab", self.vocab, hint)
        if not 0 < self.val_fraction <= 0.5:
            raise _out_of_range(
                "--val-fraction", self.val_fraction, Message("above 0, at most 0.5; 0.05 holds out 5 %")
            )
        if not (self.near_duplicates == 0 or 0.5 <= self.near_duplicates <= 1):
            raise _out_of_range(
                "--near-duplicates", self.near_duplicates, Message("from 0.5 to 1, or 0 to keep them all")
            )
        for option, value, choices in (("--val-by", self.val_by, VAL_BY), ("--filter", self.filter, FILTERS)):
            if value not in choices:
                raise _out_of_range(option, value, Message("choose from {choices}", choices=", ".join(choices)))
        if self.val and self.val_by != AUTO:
            raise ConfigError("--val and --val-by exclude each other", hint="--val names what to hold out")
        check_processes(self.processes)


def _out_of_range(option: str, value: object, hint: str) -> ConfigError:
    return ConfigError("{option} {value} is out of range", option=option, value=value, hint=hint)


def recorded(options: PrepareOptions, tokenizer: Tokenizer | None, sources: Sources) -> dict[str, Option]:
    """The options that decide the bytes, as the manifest keeps them."""
    chosen: dict[str, Option] = (
        {"tokenizer": tokenizer.sha256()} if tokenizer else {"vocab": options.vocab or DEFAULT_VOCAB}
    )
    reading: dict[str, Option] = {"field": options.reading.field, "skip_bad": int(options.reading.skip_bad)}
    if options.reading.repair:
        reading["repair"] = 1
    return {
        **chosen,
        **(reading if options.reading != AS_USUAL else {}),
        "recipe": RECIPE,
        **_split(options, sources),
        "filter": options.filter,
        "near_duplicates": options.near_duplicates,
    }


def _split(options: PrepareOptions, sources: Sources) -> dict[str, Option]:
    if held_out := [source.sha256 for source in sources.texts if source.is_held_out]:
        return {"val": key_of(*sorted(held_out))}
    return {"val_fraction": options.val_fraction, "val_by": options.val_by}
