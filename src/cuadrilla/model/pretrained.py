"""Import a GPT-2 that others have trained and published: its weights, sizes and tokenizer are read and checked.

Weights are one safetensors file. A pickle is read only if the user trusts its author (`weights.py`). The config.json
beside the weights gives the sizes.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.data.tokenizer import Tokenizer, tokenizer_json
from cuadrilla.errors import CheckpointError
from cuadrilla.messages import Message
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.hf import load_hf, require_rows, save_hf
from cuadrilla.model.weights import PICKLES, WEIGHTS
from cuadrilla.rundir import file_sha256, storage_errors, typed, write_atomic

CARD_CHARACTERS = 100_000
PICKLED = "pytorch_model.bin"
ORIGIN = "origin.json"


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    model: GPT2
    tokenizer: Tokenizer
    weights: Path


def find_weights(source: Path) -> Path:
    """`source` if it is a file; else the safetensors in that folder, or its pickle if it has no safetensors."""
    if source.is_file():
        return source
    weights, pickled = source / WEIGHTS, source / PICKLED
    return pickled if pickled.exists() and not weights.exists() else weights


def read_pretrained(source: Path, *, trust: bool) -> Pretrained:
    """Read a folder in Hugging Face's layout, or a weights file in such a folder. Raises CheckpointError, DataError."""
    if not source.exists():
        hint = "name a folder with config.json, or a file of weights"
        raise CheckpointError("{path} does not exist", path=source, hint=hint)
    weights = find_weights(source)
    folder = weights.parent
    raw = tokenizer_json(folder)
    if weights.suffix in PICKLES and not trust:
        raise CheckpointError(
            "{path} is a pickle, and opening a pickle can run any code of its author",
            path=weights,
            hint="use safetensors if it has any; if you trust its author: cuadrilla import {source} --to RUN --trust",
            source=typed(source),
        )
    model = load_hf(folder, weights=weights)
    tokenizer = Tokenizer(raw, name=Message("the tokenizer of {folder}", folder=folder))
    require_rows(tokenizer.vocab_size, rows=model.config.vocab_size)
    return Pretrained(model=model, tokenizer=tokenizer, weights=weights)


def save_pretrained(found: Pretrained, folder: Path) -> None:
    """Write the model in Hugging Face's layout, and its origin and licence in `ORIGIN`. Raises ResourceError."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sha256 = file_sha256(found.weights)
    save_hf(found.model, folder, tokenizer=found.tokenizer)
    name = f"{found.weights.resolve().parent.name}/{found.weights.name}"
    origin = {"name": name, "sha256": sha256, "licence": _licence(found.weights.with_name("README.md"))}
    write_atomic(folder / ORIGIN, json.dumps(origin, indent=1, ensure_ascii=False) + "\n")


def _licence(card: Path) -> str:
    """The licence in the front matter of a model card, or "unknown"."""
    try:
        with open(card, encoding="utf-8", errors="replace") as file:
            head = file.read(CARD_CHARACTERS)
    except OSError:
        return "unknown"
    found = re.search(r"^license:\s*[\"']?([^\s\"']+)", head.split("\n---", 1)[0], re.MULTILINE)
    return found[1] if found else "unknown"
