"""Tokenizers that others have made, in the forms in which they are published: a tokenizer.json, or GPT-2's first one,
vocab.json and merges.txt, with added_tokens.json for tokens that were added later.
"""

import json
from pathlib import Path
from typing import Any

from cuadrilla.data.tokenizer import END_OF_TEXT
from cuadrilla.errors import DataError
from cuadrilla.rundir import typed

TOKENIZER = "tokenizer.json"
VOCABULARY, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"

_SPLITTING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_json(source: Path) -> bytes:
    """A tokenizer.json as it is, or the one of a folder; made from its parts if there are only those.

    Raises DataError. What it gives is not checked: `Tokenizer` does it.
    """
    try:
        if not source.is_dir():
            return source.read_bytes()
        if (source / TOKENIZER).exists():
            return (source / TOKENIZER).read_bytes()
        if (source / VOCABULARY).exists() and (source / MERGES).exists():
            return _from_parts(source)
    except OSError as error:
        raise DataError(
            "cannot read the tokenizer {path}: {reason}",
            path=error.filename,
            reason=error.strerror or error,
            hint="name a tokenizer.json",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            "cannot read the tokenizer of {source}: {error}",
            source=source,
            error=error,
            hint="copy the model's tokenizer files again",
        ) from error
    raise DataError(
        "{source} has no {whole}, nor {vocabulary} and {merges}",
        source=source,
        whole=TOKENIZER,
        vocabulary=VOCABULARY,
        merges=MERGES,
        hint="copy the model's tokenizer into {folder}",
        folder=typed(source),
    )


def _from_parts(folder: Path) -> bytes:
    vocab: Any = json.loads((folder / VOCABULARY).read_bytes())
    added: Any = json.loads((folder / ADDED).read_bytes()) if (folder / ADDED).exists() else {}
    if not isinstance(vocab, dict) or not isinstance(added, dict):
        raise ValueError(f"{VOCABULARY} and {ADDED} must hold an object each")
    lines = (folder / MERGES).read_text(encoding="utf-8").replace("\r\n", "\n").split("\n")
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
