"""Tagged sentences, padded to one length: built-in stories, or CoNLL-U files as Universal Dependencies has them."""

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.cuentos import stories
from cuadrilla.data.cuentos.lexicon import PEOPLE
from cuadrilla.errors import DataError

LENGTH = 40  # words; longer sentences are cut
PADDING = -100  # the tag where a sentence has ended
NUM_STORIES = 800
STRANGERS = {"Leo", "Campos", "Sofía", "Navarro"}  # only in the stories that are held out

Sentence = list[tuple[str, str]]


@dataclass(frozen=True)
class Sentences:
    """A map-style dataset. `words`, `shapes`, `wanted`: shape (N, LENGTH)."""

    tags: list[str]
    words: NDArray[np.int64]
    shapes: NDArray[np.int64]
    wanted: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        return {"word": self.words[index], "shape": self.shapes[index], "tag": self.wanted[index]}

    def raw(self) -> bytes:
        return "".join(self.tags).encode() + self.words.tobytes() + self.wanted.tobytes()


def numbered(sentences: Iterable[Sentence], tags: list[str]) -> Sentences:
    """Words become hashes, and a shape: 0 nothing, 1 lower case, 2 a capital first, 3 no letter."""
    rows = [sentence[:LENGTH] for sentence in sentences if sentence]
    words, shapes = np.zeros((len(rows), LENGTH), np.int64), np.zeros((len(rows), LENGTH), np.int64)
    wanted = np.full((len(rows), LENGTH), PADDING, np.int64)
    number = {tag: index for index, tag in enumerate(tags)}
    for row, sentence in enumerate(rows):
        for column, (word, tag) in enumerate(sentence):
            words[row, column] = zlib.crc32(word.lower().encode())
            shapes[row, column] = 3 if not word[0].isalpha() else 2 if word[0].isupper() else 1
            wanted[row, column] = number.get(tag, PADDING)
    return Sentences(tags, words, shapes, wanted)


def story_sentences() -> tuple[Sentences, Sentences]:
    names = {part for person in PEOPLE for part in person.parts.values()}
    split: dict[bool, list[Sentence]] = {False: [], True: []}
    for text in stories(NUM_STORIES):
        words = re.findall(r"\w+|[^\w\s]", text)
        tagged = [(word, "person" if word in names else "other") for word in words]
        is_held_out = bool(STRANGERS & set(words))
        split[is_held_out] += [tagged[first : first + LENGTH] for first in range(0, len(tagged), LENGTH)]
    tags = ["other", "person"]
    return numbered(split[False], tags), numbered(split[True], tags)


def conllu_sentences(folder: Path) -> tuple[Sentences, Sentences]:
    train, val = (list(read_conllu(folder / f"{name}.conllu")) for name in ("train", "val"))
    tags = sorted({tag for sentence in train for _, tag in sentence})
    return numbered(train, tags), numbered(val, tags)


def read_conllu(path: Path) -> Iterator[Sentence]:
    """Forms and universal parts of speech. Raises DataError with the line that is not CoNLL-U."""
    if not path.exists():
        raise DataError(f"{path} does not exist", hint="copy a treebank there, such as UD_Spanish-GSD: train and dev")
    sentence: Sentence = []
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        columns = text.split("\t")
        if not text:
            yield sentence
            sentence = []
        elif not text.startswith("#"):
            if len(columns) != 10 or not columns[1] or not columns[3]:
                raise DataError(f"{path}:{line} is not CoNLL-U: {text[:60]!r}", hint="ten columns, divided by tabs")
            if columns[0].isdigit():  # else a contraction's range (2-3) or an empty node (2.1)
                sentence.append((columns[1], columns[3]))
    yield sentence
