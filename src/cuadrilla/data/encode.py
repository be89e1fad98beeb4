"""Text to token ids at full speed, with the ids of the library `tokenizers` whatever does the work.

`gigatoken` (https://github.com/marcelroed/gigatoken, extra `fast`) is used when it is installed and gives the same ids
on a sample of the very corpus. A document that spells a special token is always encoded by `tokenizers`, as ordinary
characters; gigatoken would emit the token.
"""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message

PLAIN = "tokenizers"
FAST = "gigatoken"
ENCODERS = ("auto", FAST, PLAIN)
_HINT = 'install it with `pip install "cuadrilla[fast]"`, or leave --encoder out'

Ids = Sequence[int] | NDArray[np.uint32]


class Encoder(Protocol):
    """Ids of each text, without an end-of-text id."""

    def __call__(self, texts: Sequence[str]) -> Sequence[Ids]: ...


def make_encoder(tokenizer: Tokenizer, name: str) -> Encoder:
    """The encoder `name` for this process. Raises ConfigError if its library is missing or refuses the tokenizer."""
    if name == PLAIN:
        return tokenizer.encode_batch
    try:
        import gigatoken

        fast = gigatoken.Tokenizer.from_json(tokenizer.json())
    except ImportError as error:
        raise ConfigError("{encoder} is not installed: {error}", encoder=FAST, error=error, hint=_HINT) from error
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            "{encoder} cannot read this tokenizer: {error}", encoder=FAST, error=error, hint="leave --encoder out"
        ) from error
    special = [token["content"] for token in json.loads(tokenizer.json()).get("added_tokens", ())]

    def encode(texts: Sequence[str]) -> Sequence[Ids]:
        found: list[Ids] = list(fast.encode_batch_list(list(texts), parallel=False))
        for number, text in enumerate(texts):
            if any(token in text for token in special):
                found[number] = tokenizer.encode(text)
        return found

    return encode


def choose_encoder(tokenizer: Tokenizer, *, wanted: str, sample: Sequence[str]) -> tuple[str, str]:
    """(name, one line that says why). `sample`: texts of the corpus on which it must agree with `tokenizers`.

    Raises ConfigError if one is asked for that cannot be used.
    """
    if wanted == PLAIN:
        return PLAIN, Message("encoder: {encoder}, as asked for", encoder=PLAIN)
    expected = tokenizer.encode_batch(sample)
    try:
        found = make_encoder(tokenizer, FAST)(sample)
        if [list(ids) for ids in found] != expected:
            raise ConfigError("{encoder} gives different ids on this text", encoder=FAST, hint="leave --encoder out")
    except ConfigError as error:
        if wanted == FAST:
            raise
        return PLAIN, Message("encoder: {encoder} ({why})", encoder=PLAIN, why=error.message)
    same = Message(
        "the same {num_ids:,} ids as {plain} on {documents:,} documents of this text",
        num_ids=sum(map(len, expected)),
        plain=PLAIN,
        documents=len(sample),
    )
    return FAST, Message("encoder: {encoder} ({why})", encoder=FAST, why=same)


def flat(ids: Sequence[Ids], *, dtype: str) -> tuple[NDArray[np.uint16 | np.uint32], NDArray[np.uint32]]:
    """All ids in one array, and how many each text has."""
    lengths = np.fromiter(map(len, ids), dtype=np.uint32, count=len(ids))
    if ids and isinstance(ids[0], np.ndarray):
        return np.concatenate(ids).astype(dtype), lengths
    return np.fromiter(chain.from_iterable(ids), dtype=dtype, count=int(lengths.sum())), lengths
