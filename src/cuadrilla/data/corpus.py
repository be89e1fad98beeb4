"""The work between sources and tokens: clean the text in parallel, drop duplicates, split it in two.

The text is dealt out in batches of about `clean.SECTION_CHARACTERS` characters. The result of a batch depends only on
the batch, so any process of any machine may clean it. Results wait on disk as `.npz` files. Memory holds 40 bytes for
each document.
"""

import io
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import unidata_version

import numpy as np
import tokenizers
from numpy.typing import NDArray

from cuadrilla.data import clean, duplicates
from cuadrilla.data.order import mixed
from cuadrilla.data.sources import Progress, Sources
from cuadrilla.messages import Message
from cuadrilla.rundir import storage_errors
from cuadrilla.version import __version__

RECIPE = 10
"""Version of the preparation, raised when equal inputs and options would give other bytes. Manifests store it."""
DROP, TRAIN, VAL = 0, 1, 2
SPLITS = {TRAIN: "train", VAL: "val"}
MIN_CHARACTERS = 20
"""Shorter documents are dropped."""
MIN_TEXTS = 20
"""With fewer texts, parts of texts are held out: a whole one would be too large a loss for training."""
DOCUMENT_SIZES = (clean.MAX_DOCUMENT, 2_000, 200)
Runner = Callable[[Iterable[Callable[[], bytes]]], Iterator[bytes]]
"""Runs calls, and gives their results in order."""
CLEANING, COMPARING = Message("cleaning"), Message("looking for near-duplicates")


def program() -> str:
    """All versions that decide the bytes of a job's result. They must be equal wherever an executor runs jobs."""
    return f"cuadrilla {__version__}.{RECIPE}, tokenizers {tokenizers.__version__}, Unicode {unidata_version}"


class TextSection(NamedTuple):
    source: int
    number: int
    """Number of the text among all texts."""
    text: str


@dataclass(frozen=True, eq=False)
class CleanChunk:
    path: Path
    first: int
    """Number of its first document in the corpus."""

    def array(self, name: str) -> NDArray[Any]:
        """One of the arrays that `clean_sections` made. Raises ResourceError if the file is gone."""
        with storage_errors(self.path), np.load(self.path) as arrays:
            return np.asarray(arrays[name])

    def texts(self) -> Iterator[str]:
        raw = self.array("content").tobytes()
        position = 0
        for size in self.array("sizes").tolist():
            yield raw[position : position + size].decode()
            position += size


class Corpus:
    """The documents of a preparation: for each its hash (`high`, `low`), sizes, text, source and split."""

    def __init__(self, chunks: list[CleanChunk]) -> None:
        self.chunks = chunks
        self.counts: Counter[str] = Counter()
        names = ("sources", "texts", "high", "low", "characters", "sizes")
        self.sources, self.texts, self.high, self.low, self.characters, self.sizes = map(self._joined, names)
        self.splits = np.full(len(self.high), TRAIN, dtype=np.uint8)
        self.note = ""
        """What was held out, and by which rule."""

    def _joined(self, name: str) -> NDArray[Any]:
        parts = [chunk.array(name) for chunk in self.chunks]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.splits))

    @property
    def num_characters(self) -> int:
        return int(self.characters[self.splits != DROP].sum())

    def documents_of_sources(self, num_sources: int) -> list[dict[str, int]]:
        """For each source, the number of its documents in each split."""
        table = np.zeros((num_sources, 3), dtype=np.int64)
        np.add.at(table, (self.sources, self.splits), 1)
        return [{name: row[split] for split, name in SPLITS.items() if row[split]} for row in table.tolist()]

    def train_texts(self, *, max_characters: int) -> Iterator[str]:
        """The documents of `TRAIN`: all of them, or about `max_characters` chosen by hash."""
        is_train = self.splits == TRAIN
        share = min(1.0, max_characters / max(1, int(self.characters[is_train].sum())))
        chosen = is_train & (self.low < np.uint64(share * 2**64)) if share < 1 else is_train
        for chunk in self.chunks:
            yield from (text for number, text in enumerate(chunk.texts(), chunk.first) if chosen[number])

    def drop_equal(self) -> None:
        """Keep the first of equal documents."""
        is_copy = np.ones(len(self.splits), dtype=np.bool_)
        is_copy[np.unique(np.stack((self.high, self.low), axis=1), axis=0, return_index=True)[1]] = False
        self.splits[is_copy] = DROP
        self.counts["documents_duplicate"] = int(np.count_nonzero(is_copy))

    def drop_contained(self, *, alike: list[int]) -> None:
        """Drop documents that earlier ones contain. Sources in `alike` are exempt: their texts resemble each other."""
        is_compared = (self.splits != DROP) & ~np.isin(self.sources, alike)
        parts = [np.zeros(0, dtype=np.uint64)]
        num_characters = self.num_characters
        for chunk in self.chunks:
            samples = duplicates.thinned(chunk.array("samples"), num_characters=num_characters)
            parts.append(samples + np.uint64(chunk.first))
        samples = np.concatenate(parts)
        samples = samples[is_compared[samples & np.uint64(0xFFFFFFFF)]]
        found = duplicates.find_contained(samples, num_documents=len(self.splits))
        self.splits[found] = DROP
        self.counts["documents_contained"] = len(found)

    def split(self, val_fraction: float) -> None:
        """Hold out about `val_fraction` of all documents."""
        kept = np.flatnonzero(self.splits != DROP)
        num_texts = len(np.unique(self.texts[kept]))
        if num_texts >= MIN_TEXTS:
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
        """For each document the hash of its text: of all documents of the text, including dropped ones."""
        each, firsts = np.unique(self.texts, return_index=True)  # the documents of a text follow each other
        hashes = mixed(np.add.reduceat(self.high, firsts))
        return np.asarray(hashes[np.searchsorted(each, self.texts)])


def make_corpus(
    work: Path, *, read: Sources, val_fraction: float, keep_all: bool, run: Runner, progress: Progress
) -> Corpus:
    """Read, clean, deduplicate and split all sources. A single document is cut finer. Raises DataError."""
    for maximum in DOCUMENT_SIZES:
        corpus = _cleaned(work, read=read, keep_all=keep_all, maximum=maximum, run=run, progress=progress)
        if len(corpus) >= 2:
            break
    corpus.split(val_fraction)
    return corpus


def _cleaned(work: Path, *, read: Sources, keep_all: bool, maximum: int, run: Runner, progress: Progress) -> Corpus:
    """Read, clean and deduplicate all sources, without splitting them."""
    counts: Counter[str] = Counter()
    total = sum(source.size_bytes for source in read.all)
    progress(CLEANING, 0, total)
    batches = _batches(read, counts)
    calls = (partial(clean_sections, batch, maximum=maximum, keep_all=keep_all) for batch in batches)
    chunks: list[CleanChunk] = []
    num_documents = 0
    for number, made in enumerate(run(calls)):
        chunk = CleanChunk(work / f"{number}.npz", num_documents)
        with storage_errors(chunk.path):
            chunk.path.write_bytes(made)
        chunks.append(chunk)
        num_documents += len(chunk.array("sizes"))
        counts.update(json.loads(chunk.array("counts").tobytes()))
        progress(CLEANING, min(total, sum(source.num_bytes for source in read.all)), total)
    corpus = Corpus(chunks)
    progress(COMPARING, 0, 0)
    corpus.drop_equal()
    if not keep_all:
        corpus.drop_contained(alike=[number for number, source in enumerate(read.all) if source.num_stories])
    corpus.counts.update(counts + read.counts)
    return corpus


def clean_sections(sections: Sequence[TextSection], *, maximum: int, keep_all: bool) -> bytes:
    """Clean a batch. Returns the content of a `.npz`: the documents, and the hashes and samples to compare them by.

    `maximum`: characters of a document. `keep_all`: drop only very short documents.
    """
    counts: Counter[str] = Counter()
    documents: list[str] = []
    origins: list[tuple[int, int]] = []
    for source, number, section in sections:
        for text in clean.documents(section, counts=counts, maximum=maximum):
            if len(text) < MIN_CHARACTERS:
                counts["documents_too_short"] += 1
            elif not keep_all and (reason := clean.reason_to_drop(text)):
                counts[f"filtered_{reason}"] += 1
            else:
                documents.append(text)
                origins.append((source, number))
    raws = [text.encode() for text in documents]
    of_document = np.array(origins, dtype=np.uint32).reshape(-1, 2)
    hashes = np.frombuffer(b"".join(map(clean.document_hash, documents)), dtype=">u8").astype(np.uint64).reshape(-1, 2)
    buffer = io.BytesIO()
    np.savez(
        buffer,
        counts=np.frombuffer(json.dumps(counts).encode(), dtype=np.uint8),
        sources=of_document[:, 0],
        texts=of_document[:, 1],
        high=hashes[:, 0],
        low=hashes[:, 1],
        samples=duplicates.samples_of([] if keep_all else documents),
        characters=np.fromiter(map(len, documents), dtype=np.uint32),
        sizes=np.fromiter(map(len, raws), dtype=np.uint32),
        content=np.frombuffer(b"".join(raws), dtype=np.uint8),
    )
    return buffer.getvalue()


def documents_of(read: Sources) -> Iterator[str]:
    """The clean documents of all sources, in order. Raises DataError."""
    counts: Counter[str] = Counter()
    for section in _sections(read, counts):
        yield from clean.documents(section.text, counts=counts)


def _sections(read: Sources, counts: Counter[str]) -> Iterator[TextSection]:
    for number, text in enumerate(read.texts()):
        for section in clean.sections(text.pieces, counts):
            yield TextSection(text.source, number, section)
        deque(text.pieces, maxlen=0)  # read the rest, too: it may be damaged


def _batches(read: Sources, counts: Counter[str]) -> Iterator[list[TextSection]]:
    """Sections in batches of about `clean.SECTION_CHARACTERS` characters, each for one process."""
    batch: list[TextSection] = []
    size = 0
    for section in _sections(read, counts):
        batch.append(section)
        size += len(section.text)
        if size >= clean.SECTION_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
