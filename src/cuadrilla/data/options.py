"""What may be asked of a preparation, and the part of it that decides the bytes."""

from dataclasses import dataclass
from pathlib import Path

from cuadrilla.data.reading import Reading
from cuadrilla.data.shards import Option
from cuadrilla.data.sources import AS_USUAL, Sources
from cuadrilla.data.tokenizer import Tokenizer

RECIPE = 7
"""Raised when the same inputs and options would give other bytes; part of the options in a manifest."""
DEFAULT_VOCAB = 8192
DEFAULT_VAL_FRACTION = 0.05


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What may be asked of a preparation."""

    vocab: int = DEFAULT_VOCAB
    """Tokens of the vocabulary to train."""
    tokenizer: Path | None = None
    """Use this `tokenizer.json` instead of training one."""
    val_fraction: float = DEFAULT_VAL_FRACTION
    """Above 0, at most 0.5."""
    val: tuple[str, ...] = ()
    """Files and folders to hold out instead."""
    reading: Reading = AS_USUAL
    """How records are read."""
    keep_all: bool = False
    """Drop nothing but very short documents and equal ones: keep near-duplicates, and what no book has."""
    force: bool = False
    """Replace a folder that was prepared from other inputs."""
    processes: int | None = None
    """None: one for each core."""


def recorded(options: PrepareOptions, tokenizer: Tokenizer | None, sources: Sources) -> dict[str, Option]:
    """The options that decide the bytes, as the manifest keeps them."""
    held_out = sorted(source.sha256 for source in sources.all if source.is_held_out)
    return {
        **({"tokenizer": tokenizer.sha256()} if tokenizer else {"vocab": options.vocab}),
        "field": options.reading.field,
        "skip_bad": int(options.reading.skip_bad),
        "recipe": RECIPE,
        **({"val": " ".join(held_out)} if held_out else {"val_fraction": options.val_fraction}),
        "keep_all": int(options.keep_all),
    }
