"""Everything between the sources and the tokens: cleaned in parallel, each document once, split in two.

The text is dealt in batches of about `clean.SECTION_CHARACTERS` characters. What a batch becomes depends on its text
and the options alone, and waits on disk. In memory there are 40 bytes for each document.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data import clean, duplicates
from cuadrilla.data.executor import Call, Workers
from cuadrilla.data.order import mixed
from cuadrilla.data.sources import Progress, Sources, TextPiece
from cuadrilla.data.work import clean_texts
from cuadrilla.messages import Message
from cuadrilla.rundir import storage_errors

DROP, TRAIN, VAL = 0, 1, 2
MIN_TEXTS = 20
"""Among fewer texts none is held out whole: it would be missed."""
DOCUMENT_SIZES = (clean.MAX_DOCUMENT, 2_000, 200)
CLEANING, COMPARING = Message("cleaning"), Message("looking for near-duplicates")


@dataclass(frozen=True, eq=False)
class CleanChunk:
    """A batch on disk, clean."""

    path: Path
    first: int
    """Number of its first document."""
    count: int

    def array(self, name: str) -> NDArray[Any]:
        """One array. Raises ResourceError if the file is gone."""
        return _array(self.path, name)

    def texts(self) -> Iterator[str]:
        """Its documents."""
        raw = self.array("text").tobytes()
        position = 0
        for size in self.array("sizes").tolist():
            yield raw[position : position + size].decode()
            position += size


class Corpus:
    """The documents of a preparation, each with its hash, size, text, source and split."""

    def __init__(
        self, chunks: list[CleanChunk], *, sources: list[NDArray[np.uint32]], texts: list[NDArray[np.uint32]]
    ) -> None:
        self.chunks = chunks
        self.counts: Counter[str] = Counter()
        self.sources, self.texts = np.concatenate(sources), np.concatenate(texts)
        hashes = np.concatenate([np.zeros((0, 2), dtype=">u8"), *(chunk.array("hashes") for chunk in chunks)])
        self.high, self.low = hashes[:, 0].astype(np.uint64), hashes[:, 1].astype(np.uint64)
        characters = (chunk.array("characters") for chunk in chunks)
        self.characters = np.concatenate([np.zeros(0, dtype=np.uint32), *characters])
        self.splits = np.full(len(self.high), TRAIN, dtype=np.uint8)
        self.note = ""
        """How VAL was chosen, and why so."""

    def __len__(self) -> int:
        return int(np.count_nonzero(self.splits))

    @property
    def num_characters(self) -> int:
        return int(self.characters[self.splits != DROP].sum())

    def splits_of(self, chunk: CleanChunk) -> NDArray[np.uint8]:
        return self.splits[chunk.first : chunk.first + chunk.count]

    def train_texts(self, *, max_characters: int) -> Iterator[str]:
        """TRAIN: all of it, or about `max_characters` chosen by hash."""
        is_train = self.splits == TRAIN
        share = min(1.0, max_characters / max(1, int(self.characters[is_train].sum())))
        chosen = is_train & (self.low < np.uint64(share * 2**64)) if share < 1 else is_train
        for chunk in self.chunks:
            mine = chosen[chunk.first : chunk.first + chunk.count]
            yield from (text for is_mine, text in zip(mine.tolist(), chunk.texts(), strict=True) if is_mine)

    def drop_equal(self) -> None:
        """Keep the first of equal documents."""
        is_copy = np.ones(len(self.splits), dtype=np.bool_)
        is_copy[np.unique(np.stack((self.high, self.low), axis=1), axis=0, return_index=True)[1]] = False
        self.splits[is_copy] = DROP
        self.counts["documents_duplicate"] = int(np.count_nonzero(is_copy))

    def drop_contained(self, *, alike: list[int]) -> None:
        """Drop what is in earlier documents; those of the sources `alike` are so on purpose."""
        is_compared = (self.splits != DROP) & ~np.isin(self.sources, alike)
        parts = [np.zeros(0, dtype=np.uint64)]
        for chunk in self.chunks:
            samples = duplicates.thinned(chunk.array("samples"), num_characters=self.num_characters)
            parts.append(samples + np.uint64(chunk.first))
        samples = np.concatenate(parts)
        samples = samples[is_compared[samples & np.uint64(0xFFFFFFFF)]]
        found = duplicates.find_contained(samples, num_documents=len(self.splits))
        self.splits[found] = DROP
        self.counts["documents_contained"] = len(found)

    def split(self, val_fraction: float, *, named: list[int]) -> None:
        """Hold some documents out, those of the sources `named` if there are any."""
        kept = np.flatnonzero(self.splits != DROP)
        num_texts = len(np.unique(self.texts[kept]))
        if named:
            is_val, how = np.isin(self.sources[kept], named), Message("what --val names")
        elif num_texts >= MIN_TEXTS:
            is_val = clean.split_texts(
                self._text_hashes()[kept], self.texts[kept], self.characters[kept], val_fraction=val_fraction
            )
            num_held = len(np.unique(self.texts[kept][is_val]))
            how = Message("{num_held:,} of {num_texts:,} texts, whole", num_held=num_held, num_texts=num_texts)
        else:
            is_val = clean.split_documents(self.high[kept], val_fraction=val_fraction)
            how = Message("parts of texts (only {num_texts} in all)", num_texts=num_texts)
        self.splits[kept[is_val]] = VAL
        share = self.characters[kept[is_val]].sum() / max(1, self.num_characters)
        self.note = Message("held out: {how}; {share:.1%} of the characters", how=how, share=share)

    def _text_hashes(self) -> NDArray[np.uint64]:
        """For each document a hash of its text: of all its documents, also of those that others have already."""
        each, firsts = np.unique(self.texts, return_index=True)  # the documents of a text follow each other
        hashes = mixed(np.add.reduceat(self.high, firsts))
        return np.asarray(hashes[np.searchsorted(each, self.texts)])


def make_corpus(
    work: Path, *, read: Sources, val_fraction: float, keep_all: bool, workers: Workers, progress: Progress
) -> Corpus:
    """Read, clean, deduplicate and split everything; a single document is cut finer. Raises DataError."""
    for maximum in DOCUMENT_SIZES:
        corpus = _cleaned(work, read=read, keep_all=keep_all, maximum=maximum, workers=workers, progress=progress)
        if len(corpus) >= 2:
            break
    corpus.split(val_fraction, named=[number for number, each in enumerate(read.all) if each.is_held_out])
    return corpus


def _cleaned(
    work: Path, *, read: Sources, keep_all: bool, maximum: int, workers: Workers, progress: Progress
) -> Corpus:
    """Each document once, no split yet."""
    counts: Counter[str] = Counter()
    total = sum(source.size_bytes for source in read.all)
    batches: list[list[TextPiece]] = []

    def calls() -> Iterator[Call]:
        for batch in _batches(read, counts):
            batches.append([piece for piece, _ in batch])
            sections = [section for _, section in batch]
            keep_indentation = [piece.keeps_indentation for piece, _ in batch]
            yield partial(clean_texts, sections, keep_indentation, maximum=maximum, keep_all=keep_all)

    progress(CLEANING, 0, total)
    chunks: list[CleanChunk] = []
    sources, texts = ([np.zeros(0, dtype=np.uint32)] for _ in range(2))
    first = 0
    for number, made in enumerate(workers.run(calls())):
        path, pieces = work / f"{number}.npz", batches[number]
        with storage_errors(path):
            path.write_bytes(made)
        of_text = _array(path, "of_text")
        sources.append(np.array([piece.source for piece in pieces], dtype=np.uint32)[of_text])
        texts.append(np.array([piece.number for piece in pieces], dtype=np.uint32)[of_text])
        chunks.append(CleanChunk(path, first, len(of_text)))
        first += len(of_text)
        counts.update(json.loads(_array(path, "counts").tobytes()))
        progress(CLEANING, min(total, sum(source.num_bytes for source in read.all)), total)
    corpus = Corpus(chunks, sources=sources, texts=texts)
    progress(COMPARING, 0, 0)
    corpus.drop_equal()
    if not keep_all:
        corpus.drop_contained(alike=[number for number, source in enumerate(read.all) if source.num_stories])
    corpus.counts.update(counts + read.counts)
    return corpus


def documents_of(read: Sources) -> Iterator[str]:
    """The documents of everything, clean. Raises DataError."""
    counts: Counter[str] = Counter()
    for piece, section in _sections(read, counts):
        yield from clean.documents(section, keep_indentation=piece.keeps_indentation, counts=counts)


def _sections(read: Sources, counts: Counter[str]) -> Iterator[tuple[TextPiece, str]]:
    """The sections of every text, each with a piece of that text."""
    for _, pieces in groupby(read.read(), key=lambda piece: piece[:2]):
        first = next(pieces)
        for section in clean.sections((piece.text for piece in chain([first], pieces)), counts):
            yield first._replace(text=""), section


def _batches(read: Sources, counts: Counter[str]) -> Iterator[list[tuple[TextPiece, str]]]:
    """Sections for one process."""
    batch: list[tuple[TextPiece, str]] = []
    size = 0
    for piece, section in _sections(read, counts):
        batch.append((piece, section))
        size += len(section)
        if size >= clean.SECTION_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _array(path: Path, name: str) -> NDArray[Any]:
    with storage_errors(path), np.load(path) as arrays:
        return np.asarray(arrays[name])
