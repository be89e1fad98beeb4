"""Models that others have trained, as they are published: a GPT-2's weights, sizes and tokenizer, checked.

Weights are safetensors, whole or in parts (`weights.py`); a pickle only if its owner trusts its maker, and then
in a process of its own (`unpickle.py`). Sizes are those of the config.json beside them, the tokenizer is
tokenizer.json or its older parts.
"""

import hashlib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.errors import CheckpointError, DataError
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.hf import load_hf, save_hf
from cuadrilla.model.unpickle import read_pickled
from cuadrilla.model.weights import INDEX, PICKLE_HINT, WEIGHTS, files_of, weights_of
from cuadrilla.rundir import storage_errors, typed, write_atomic

CARD_CHARACTERS = 100_000
SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth")
PICKLED = "pytorch_model.bin"
TOKENIZER = "tokenizer.json"
ORIGIN = "origin.json"
VOCABULARY, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"

_SPLITTING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model as it was found; `note` says what the reading of a pickle could not be kept from."""

    model: GPT2
    tokenizer: bytes
    weights: Path
    note: str = ""


def find_weights(source: Path) -> Path:
    """The file of weights that a path names: itself, or that of a folder, or the index of its parts.

    Raises CheckpointError.
    """
    if source.is_file():
        if source.suffix == SUFFIX and source.name != WEIGHTS and source.with_name(INDEX).exists():
            raise CheckpointError(
                f"{source} is one of several files", hint=f"name their folder, {typed(source.parent)}"
            )
        return source
    if not source.is_dir():
        raise CheckpointError(f"{source} does not exist", hint="name a folder with config.json, or a file of weights")
    if weights_of(source).exists():
        return weights_of(source)
    pickled = sorted(path for path in source.iterdir() if path.suffix in PICKLES and path.name != "training_args.bin")
    if (source / f"{PICKLED}.index.json").exists() and source / PICKLED not in pickled:
        raise CheckpointError(f"{source} holds pickles that belong together", hint=PICKLE_HINT)
    if len(pickled) > 1:
        names = ", ".join(path.name for path in pickled[:4])
        raise CheckpointError(f"{source} holds several files of weights: {names}", hint="name one of them")
    return pickled[0] if pickled else source / WEIGHTS


def read_pretrained(source: Path, *, trust: bool) -> Pretrained:
    """A folder in Hugging Face's layout, or a file of weights that lies in one. Raises CheckpointError, DataError."""
    weights = find_weights(source)
    folder = weights.parent
    raw = tokenizer_json(folder)
    tokenizer = Tokenizer(raw, name=f"the tokenizer of {folder}")
    note = ""
    if weights.suffix not in PICKLES:
        model = load_hf(folder, weights=weights)
    elif not trust:
        raise CheckpointError(
            f"{weights} is a pickle, and opening a pickle can run any code of whoever made it",
            hint="take safetensors where there are; if you trust its maker: "
            f"cuadrilla import {typed(source)} --to RUN --trust",
        )
    else:
        with tempfile.TemporaryDirectory(prefix="cuadrilla-import-") as name:
            note = read_pickled(weights, Path(name) / WEIGHTS)
            model = load_hf(folder, weights=Path(name) / WEIGHTS)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size:,} tokens, the model {model.config.vocab_size:,}",
            hint="the tokenizer and the weights must belong together",
        )
    return Pretrained(model=model, tokenizer=raw, weights=weights, note=note)


def save_pretrained(found: Pretrained, folder: Path) -> None:
    """Keep it in our form of Hugging Face's layout, with where it came from. Raises ResourceError."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        for path in files_of(found.weights):  # of parts, the SHA-256 of one behind the other
            with open(path, "rb") as file:
                hashlib.file_digest(file, lambda: digest)
    write_atomic(folder / TOKENIZER, found.tokenizer)
    save_hf(found.model, folder, tokenizer_path=folder / TOKENIZER)
    name = f"{found.weights.resolve().parent.name}/{found.weights.name}"
    origin = {"name": name, "sha256": digest.hexdigest(), "licence": _licence(found.weights.with_name("README.md"))}
    write_atomic(folder / ORIGIN, json.dumps(origin, indent=1, ensure_ascii=False) + "\n")


def _licence(card: Path) -> str:
    """What the front matter of a model card says."""
    try:
        with open(card, encoding="utf-8", errors="replace") as file:
            head = file.read(CARD_CHARACTERS)
    except OSError:
        return "unknown"
    found = re.search(r"^license:\s*[\"']?([^\s\"']+)", head.split("\n---", 1)[0], re.MULTILINE)
    return found[1] if found else "unknown"


def tokenizer_json(folder: Path) -> bytes:
    """The content of a folder's tokenizer.json; made from vocab.json and merges.txt if there is only that.

    Raises DataError. What it gives is not checked: `data.tokenizer.Tokenizer` does it.
    """
    try:
        if (folder / TOKENIZER).is_file():
            return (folder / TOKENIZER).read_bytes()
        if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
            return _from_parts(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot read the tokenizer of {folder}: {error}", hint="copy the model's tokenizer files again"
        ) from error
    raise DataError(
        f"{folder} has no {TOKENIZER}, nor {VOCABULARY} and {MERGES}",
        hint=f"copy the model's tokenizer into {typed(folder)}",
    )


def _from_parts(folder: Path) -> bytes:
    """GPT-2's first form: byte-level BPE in two files, tokens that were added later in a third."""
    vocab: Any = json.loads((folder / VOCABULARY).read_bytes())
    added: Any = json.loads((folder / ADDED).read_bytes()) if (folder / ADDED).is_file() else {}
    if not isinstance(vocab, dict) or not isinstance(added, dict):
        raise ValueError(f"{VOCABULARY} and {ADDED} must hold an object each")
    lines = (folder / MERGES).read_text(encoding="utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    special = {**({END_OF_TEXT: vocab[END_OF_TEXT]} if END_OF_TEXT in vocab else {}), **added}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    value = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in special.items()],
        "normalizer": None,
        "pre_tokenizer": _SPLITTING,
        "post_processor": None,
        "decoder": _SPLITTING,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return json.dumps(value, ensure_ascii=False).encode()
