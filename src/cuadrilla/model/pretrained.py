"""Models that others have trained, as they are published: where the tokenizer of a folder is."""

import json
from pathlib import Path
from typing import Any

from cuadrilla.data.tokenizer import END_OF_TEXT
from cuadrilla.errors import DataError

TOKENIZER = "tokenizer.json"
VOCABULARY, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"

_SPLITTING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


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
        f"{folder} has no {TOKENIZER}, nor {VOCABULARY} and {MERGES}", hint="copy the model's tokenizer beside it"
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
