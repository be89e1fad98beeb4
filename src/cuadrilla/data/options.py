"""What may be asked of a preparation, and the part of it that decides the bytes."""

from dataclasses import dataclass
from pathlib import Path

from cuadrilla.data import duplicates
from cuadrilla.data.chunks import key_of
from cuadrilla.data.corpus import AUTO, VAL_BY
from cuadrilla.data.encode import ENCODERS
from cuadrilla.data.filters import FILTERS
from cuadrilla.data.formats.record import Reading
from cuadrilla.data.pool import check_processes
from cuadrilla.data.shards import Option
from cuadrilla.data.sources import AS_USUAL, Found
from cuadrilla.data.tokenizer import MAX_VOCAB, MIN_VOCAB, Tokenizer
from cuadrilla.errors import ConfigError

RECIPE = 4
"""Raised when the same inputs and options would give other bytes; part of the options in a manifest."""
DEFAULT_VOCAB = 8192
DEFAULT_VAL_FRACTION = 0.05
DEFAULT_MIN_CHARACTERS = 20
DEFAULT_FILTER = "books"


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
    min_characters: int = DEFAULT_MIN_CHARACTERS
    """Drop documents shorter than this."""
    reading: Reading = AS_USUAL
    """How records are read."""
    filter: str = DEFAULT_FILTER
    """Which rules of `filters.FILTERS` drop documents."""
    near_duplicates: float = duplicates.DEFAULT_SIMILARITY
    """Similarity from which a document repeats an earlier one; 0 keeps all but equal ones."""
    force: bool = False
    """Replace a folder that was prepared from other inputs."""
    add: bool = False
    """Replace a folder that was prepared from a part of these inputs, and keep its tokenizer."""
    keep_work: bool = False
    """Leave the clean text on disk, for a later `add`."""
    processes: int | None = None
    """None: one for each core."""
    encoder: str = "auto"

    def __post_init__(self) -> None:
        if self.vocab is not None and self.tokenizer is not None:
            raise ConfigError("--vocab and --tokenizer exclude each other", hint="a given tokenizer has its own size")
        if self.vocab is not None and not MIN_VOCAB <= self.vocab <= MAX_VOCAB:
            raise ConfigError(
                "--vocab {vocab} is out of range",
                vocab=self.vocab,
                hint="choose from {least} (the 256 bytes and the end of a text) to {most:,}",
                least=MIN_VOCAB,
                most=MAX_VOCAB,
            )
        if not 0 < self.val_fraction <= 0.5:
            raise ConfigError(
                "--val-fraction {val_fraction} is out of range",
                val_fraction=self.val_fraction,
                hint="above 0, at most 0.5; 0.05 holds out 5 %",
            )
        if self.val_by not in VAL_BY:
            raise ConfigError(
                "--val-by {val_by!r} is unknown",
                val_by=self.val_by,
                hint="choose from {choices}",
                choices=", ".join(VAL_BY),
            )
        if self.val and self.val_by != AUTO:
            raise ConfigError("--val and --val-by exclude each other", hint="--val names what to hold out")
        if self.min_characters < 1:
            raise ConfigError(
                "--min-characters {characters} is out of range", characters=self.min_characters, hint="1 or more"
            )
        if self.filter not in FILTERS:
            raise ConfigError(
                "--filter {filter!r} is unknown",
                filter=self.filter,
                hint="choose from {choices}",
                choices=", ".join(FILTERS),
            )
        if not (self.near_duplicates == 0 or 0.5 <= self.near_duplicates <= 1):
            raise ConfigError(
                "--near-duplicates {similarity} is out of range",
                similarity=self.near_duplicates,
                hint="from 0.5 to 1, or 0 to keep them all",
            )
        if self.encoder not in ENCODERS:
            raise ConfigError(
                "--encoder {encoder!r} is unknown",
                encoder=self.encoder,
                hint="choose from {choices}",
                choices=", ".join(ENCODERS),
            )
        if self.add and (self.force or self.vocab is not None or self.tokenizer is not None):
            raise ConfigError("--add excludes --force, --vocab and --tokenizer", hint="it keeps the folder's tokenizer")
        check_processes(self.processes)


def recorded(options: PrepareOptions, tokenizer: Tokenizer | None, found: Found) -> dict[str, Option]:
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
        **_split(options, found),
        "min_characters": options.min_characters,
        "filter": options.filter,
        "near_duplicates": options.near_duplicates,
    }


def _split(options: PrepareOptions, found: Found) -> dict[str, Option]:
    if found.held_out:
        return {"val": key_of(*sorted(found.sources[number].sha256 for number in found.held_out))}
    return {"val_fraction": options.val_fraction, "val_by": options.val_by}
