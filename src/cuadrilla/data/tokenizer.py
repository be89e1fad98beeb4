"""Byte-level BPE, over the `tokenizers` library.

Invariants
* `decode(encode(text)) == text` for every Unicode text: nothing is normalised here, the alphabet is the 256 bytes.
* `encode` never emits the end-of-text id: its literal spelling in a text is encoded as ordinary characters.
* The same texts give the same bytes of `tokenizer.json`, in any order, on any number of cores. `sha256()` is the hash
  of those bytes; a manifest stores it.

Before the merges, text is split as GPT-2 does it (https://github.com/openai/gpt-2/blob/master/src/encoder.py), so that
a model can be exported as GPT-2.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.rundir import write_atomic

END_OF_TEXT = "<|endoftext|>"
UNNAMED = Message("the tokenizer")
MIN_VOCAB = 257
MAX_VOCAB = 2**20

_OTHER_ENDS = ("<|end_of_text|>", "</s>", "<eos>")
_PROBE = "  El  niño: «¿Qué año?»,\n\n\tdijo Ñandú — n\u0303 \u00a0 🙂 1605 \x00 " + END_OF_TEXT + " x\n"


class Tokenizer:
    """Text to token ids and back. Make one with `train` or `load`."""

    def __init__(self, raw: bytes, *, name: str = UNNAMED) -> None:
        """`raw` is the content of a `tokenizer.json`. Raises DataError if it breaks an invariant."""
        self._raw = raw
        self._inner = _parse(raw, name)
        self._added = frozenset(self._inner.get_added_tokens_decoder())
        ids = self._inner.get_vocab(with_added_tokens=True)
        end = next((ids[token] for token in (END_OF_TEXT, *_OTHER_ENDS) if token in ids), None)
        if end is None:
            raise DataError(
                "{name} has no end-of-text token",
                name=name,
                hint="add {end} to it, or train one with --vocab",
                end=END_OF_TEXT,
            )
        self.end_of_text: int = end
        self.vocab_size: int = max(ids.values()) + 1
        if not self._gives_back(_PROBE):
            raise _changes_text(name)

    def _gives_back(self, text: str) -> bool:
        ids = self.encode(text)
        return self.end_of_text not in ids and self.decode(ids) == text

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Self:
        """Learn merges from `texts`, which must be in NFC. A text with too few merges gives a smaller vocabulary."""
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner.to_str().encode())

    @classmethod
    def load(cls, path: Path, *, sha256: str | None = None) -> Self:
        """Read any model's `tokenizer.json`. With `sha256`, a file with another hash is refused. Raises DataError."""
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(
                "cannot read the tokenizer {path}: {reason}",
                path=path,
                reason=error.strerror or error,
                hint="name a tokenizer.json",
            ) from error
        found = hashlib.sha256(raw).hexdigest()
        if sha256 is not None and found != sha256:
            raise DataError(
                "{path} has hash {found}, but the manifest names {expected}: another tokenizer made the tokens",
                path=path,
                found=found[:12],
                expected=sha256[:12],
                hint="put the right tokenizer.json back, or prepare the folder again",
            )
        return cls(raw, name=str(path))

    def save(self, path: Path) -> None:
        write_atomic(path, self._raw)

    def sha256(self) -> str:
        return hashlib.sha256(self._raw).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, never `end_of_text`. Raises DataError for half a surrogate pair, which no text file holds."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for each text, on all cores."""
        try:
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise DataError(
                "the text contains half a surrogate pair, which is not valid Unicode", hint="save it again as UTF-8"
            ) from error
        return [encoding.ids for encoding in encodings]

    def packed(self, texts: Sequence[str]) -> NDArray[np.uint32]:
        """The ids of documents one after the other, each followed by `end_of_text`."""
        encoded = self.encode_batch(texts)
        return np.fromiter(chain.from_iterable((*ids, self.end_of_text) for ids in encoded), dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, with `end_of_text` spelled out. Invalid UTF-8 (a cut character) becomes U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for. An added token, such as `end_of_text`, stands for its name."""
        name = str(self._inner.id_to_token(token) or "")
        if token in self._added or not all(letter in _byte_letters() for letter in name):
            return name.encode()
        return bytes(_byte_letters()[letter] for letter in name)


def tokenizer_json(folder: Path) -> bytes:
    """The tokenizer.json of a model's folder. If there is none, it is made from GPT-2's older files: vocab.json,
    merges.txt and, for tokens that were added later, added_tokens.json. Raises DataError.

    The result is not checked; `Tokenizer` checks it.
    """
    try:
        if (folder / "tokenizer.json").exists() or not (folder / "vocab.json").exists():
            return (folder / "tokenizer.json").read_bytes()
        vocab, added = (
            dict(json.loads(path.read_bytes())) if path.exists() else {}
            for path in (folder / "vocab.json", folder / "added_tokens.json")
        )
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        hint = "copy the model's tokenizer.json, or its vocab.json and merges.txt"
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            "cannot read the tokenizer of {folder}: {reason}", folder=folder, reason=reason, hint=hint
        ) from error
    special = {**({END_OF_TEXT: vocab[END_OF_TEXT]} if END_OF_TEXT in vocab else {}), **added}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    splitting = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    value = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in special.items()],
        "pre_tokenizer": splitting,
        "decoder": splitting,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return json.dumps(value, ensure_ascii=False).encode()


@cache
def _byte_letters() -> dict[str, int]:
    """The byte for each letter of a byte-level token. Bytes that do not print have the letters from U+0100 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _changes_text(name: str) -> DataError:
    hint = "use a byte-level tokenizer such as GPT-2's, or train one"
    return DataError("{name} loses or changes text", name=name, hint=hint)


def _steps(*given: Any) -> Iterator[Any]:
    """All steps of normalizers or decoders, nested sequences flattened."""
    for step in filter(None, given):
        parts = step.get("normalizers", step.get("decoders")) if step.get("type") == "Sequence" else None
        yield from [step] if parts is None else _steps(*parts)


def _parse(raw: bytes, name: str) -> tokenizers.Tokenizer:
    """Parse a tokenizer.json. Steps that replace text are refused first: a few can turn a letter into gigabytes."""
    try:
        value = json.loads(raw)
        if not all(step.get("type") == "ByteLevel" for step in _steps(value.get("normalizer"), value.get("decoder"))):
            raise _changes_text(name)
        inner = tokenizers.Tokenizer.from_buffer(raw)
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            "{name} is not a tokenizer.json: {error}", name=name, error=error, hint="name the tokenizer.json of a model"
        ) from error
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    if isinstance(inner.model, models.BPE) and inner.model.dropout:
        inner.model.dropout = None
    return inner
