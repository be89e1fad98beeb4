"""Everything between the sources and the tokens: cleaned in parallel, each document once, split in two.

The text is dealt in batches of about `clean.SECTION_CHARACTERS` characters. What a batch becomes depends on its text
and the options alone, is named by them and stays on disk, so a preparation that was interrupted, or that is repeated
with more files, finds it again. Where batches end depends on the source, not on its neighbours, except that up to
some sixteen small files share one.

In memory for each document: 40 bytes, and 8 more at a time while near-duplicates are sought.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data import clean, containment, duplicates
from cuadrilla.data.chunks import Chunk, is_whole, key_of, write_chunk
from cuadrilla.data.executor import Call, Workers
from cuadrilla.data.listing import TextSource
from cuadrilla.data.options import RECIPE, PrepareOptions
from cuadrilla.data.sources import Progress, Sources, TextPiece
from cuadrilla.data.work import DROP, TRAIN, VAL, CleanJob, clean_texts, texts_of
from cuadrilla.messages import Message

SMALL_SOURCE_BYTES = 2**16
MIN_TEXTS = 20
"""Of fewer texts none is held out whole: it would be missed."""
DROPPED_SAMPLES = 20
"""Examples kept of each reason."""
CLEANING, COMPARING = Message("cleaning"), Message("looking for near-duplicates")


@dataclass(kw_only=True)
class _Batch:
    """Text for one process."""

    source: TextSource
    """The last one."""
    sources: list[int] = field(default_factory=list)
    """Number of the source of each text."""
    numbers: list[int] = field(default_factory=list)
    """Of each text among all; a long one is dealt in several pieces."""
    texts: list[bytes] = field(default_factory=list)
    keep_indentation: list[bool] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, piece: TextPiece, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        self.sources.append(piece.source)
        self.numbers.append(piece.number)
        self.texts.append(raw)
        self.keep_indentation.append(piece.keeps_indentation)
        self.num_bytes += len(raw)

    def job(self, options: PrepareOptions, *, maximum: int) -> CleanJob:
        return CleanJob(
            maximum=maximum,
            filter=options.filter,
            near=options.near_duplicates > 0 and not self.source.num_stories,  # stories are alike on purpose
            keep_indentation=self.keep_indentation,
            sizes=[len(text) for text in self.texts],
        )


@dataclass(frozen=True, eq=False)
class CleanChunk:
    """A batch on disk, clean."""

    key: str
    chunk: Chunk
    first: int
    """Number of its first document."""
    count: int


class Corpus:
    """The documents of a preparation, each with its hash, size, text, source and split."""

    def __init__(
        self, chunks: list[CleanChunk], *, sources: list[NDArray[np.uint32]], texts: list[NDArray[np.uint32]]
    ) -> None:
        self.chunks = chunks
        self._firsts = np.array([chunk.first for chunk in chunks])
        self.counts: Counter[str] = Counter()
        self.dropped: list[dict[str, Any]] = []
        self.sources, self.texts = _joined(sources, "u4"), _joined(texts, "u4")
        hashes = _joined([chunk.chunk.array("hashes") for chunk in chunks], ">u8").reshape(-1, 2)
        self.high, self.low = hashes[:, 0].astype(np.uint64), hashes[:, 1].astype(np.uint64)
        self.characters = _joined([chunk.chunk.array("characters") for chunk in chunks], "u4")
        self.splits = np.full(len(self.high), TRAIN, dtype=np.uint8)
        self.held_out = np.zeros(0, dtype=np.uint64)
        """Hashes of the long paragraphs of VAL."""
        self.note = ""
        """How VAL was chosen, and why so."""

    def __len__(self) -> int:
        return int(np.count_nonzero(self.splits))

    @property
    def num_characters(self) -> int:
        return int(self.characters[self.splits != DROP].sum())

    def splits_of(self, chunk: CleanChunk) -> NDArray[np.uint8]:
        return self.splits[chunk.first : chunk.first + chunk.count]

    def removed_from(self, chunk: CleanChunk) -> NDArray[np.uint64]:
        """Hashes of the paragraphs that leave the TRAIN documents of a chunk, sorted."""
        is_train = self.splits_of(chunk)[chunk.chunk.array("paragraph_of")] == TRAIN
        return np.intersect1d(chunk.chunk.array("paragraphs")[is_train], self.held_out)

    def train_texts(self, *, max_characters: int) -> Iterator[str]:
        """TRAIN as it will be encoded: all of it, or about `max_characters` chosen by hash."""
        is_train = self.splits == TRAIN
        share = min(1.0, max_characters / max(1, int(self.characters[is_train].sum())))
        chosen = is_train & (self.low < np.uint64(share * 2**64)) if share < 1 else is_train
        for chunk in self.chunks:
            mine = chosen[chunk.first : chunk.first + chunk.count]
            if not mine.any():
                continue
            removed = set(self.removed_from(chunk).tolist())
            for is_chosen, text in zip(mine.tolist(), texts_of(chunk.chunk), strict=True):
                if is_chosen and (kept := clean.without_paragraphs(text, removed)[0]).strip():
                    yield kept

    def text(self, document: int) -> str:
        chunk = self._chunk_of(document)
        return next(islice(texts_of(chunk.chunk), document - chunk.first, None))

    def _chunk_of(self, document: int) -> CleanChunk:
        return self.chunks[int(np.searchsorted(self._firsts, document, side="right")) - 1]

    def drop_duplicates(self, *, similarity: float, names: list[str], progress: Progress) -> None:
        """Keep the first of equal documents, then the first of similar ones."""
        firsts = duplicates.first_of_equals(self.high, self.low)
        is_first = firsts == np.arange(len(firsts))
        copies = np.flatnonzero(~is_first)
        pairs = zip(copies.tolist(), firsts[copies].tolist(), strict=True)
        self._drop("documents_duplicate", list(pairs), names)
        if not similarity:
            return
        self._drop_similar(is_first, similarity=similarity, names=names, progress=progress)
        held = containment.find_contained(self._samples(), num_documents=len(self.splits), share=similarity)
        self._drop("documents_contained", held, names)

    def _samples(self) -> NDArray[np.uint64]:
        """Of what is kept; fewer of a very large corpus."""
        halvings = size = 0
        parts = [np.zeros(0, dtype=np.uint64)]
        for chunk in self.chunks:
            found = containment.thinned(chunk.chunk.array("samples"), halvings=halvings) + np.uint64(chunk.first)
            parts.append(found[self.splits[found & np.uint64(0xFFFFFFFF)] != DROP])
            size += len(parts[-1])
            if size > containment.MAX_SAMPLES:
                halvings += 1
                parts = [containment.thinned(part, halvings=halvings) for part in parts]
                size = sum(map(len, parts))
        return np.concatenate(parts)

    def _drop_similar(
        self, is_first: NDArray[np.bool_], *, similarity: float, names: list[str], progress: Progress
    ) -> None:
        pairs, bands = np.zeros(0, dtype=np.uint64), range(duplicates.NUM_BANDS)
        for band in bands:
            progress(COMPARING, band, duplicates.NUM_BANDS)
            keys = _joined([_band(chunk, band) for chunk in self.chunks], "u8")
            keys[~is_first] = 0
            pairs = np.union1d(pairs, duplicates.candidates(keys))
        progress(COMPARING, duplicates.NUM_BANDS, duplicates.NUM_BANDS)
        read = lru_cache(maxsize=32)(lambda chunk: np.concatenate([chunk.chunk.array(f"band{band}") for band in bands]))

        def signature(document: int) -> NDArray[np.uint32]:
            chunk = self._chunk_of(document)
            return np.asarray(read(chunk)[:, document - chunk.first])

        found = duplicates.near_duplicates(pairs, signature, similarity=similarity)
        self._drop("documents_near_duplicate", found, names)

    def _drop(self, reason: str, pairs: list[tuple[int, int]], names: list[str]) -> None:
        """Drop documents, each because of another one."""
        self.counts[reason] = len(pairs)
        self.splits[[document for document, _ in pairs]] = DROP
        for document, other in pairs[:DROPPED_SAMPLES]:
            begins = " ".join(self.text(document)[:600].split())[:300]
            row = {"reason": reason, "source": names[self.sources[document]], "begins": begins}
            row["characters"] = int(self.characters[document])
            row["like"] = names[self.sources[other]]
            self.dropped.append(row)

    def split(self, val_fraction: float, *, named: NDArray[np.uint32]) -> None:
        """Hold some documents out, those of the sources `named` if there are any."""
        kept = np.flatnonzero(self.splits != DROP)
        num_texts = len(np.unique(self.texts[kept]))
        if len(named):
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
        self._find_held_out()

    def _text_hashes(self) -> NDArray[np.uint64]:
        """For each document a hash of its text: of all its documents, also of those that others have already."""
        each, firsts = np.unique(self.texts, return_index=True)  # the documents of a text follow each other
        hashes = duplicates.mixed(np.add.reduceat(self.high, firsts)) if len(each) else self.high
        return np.asarray(hashes[np.searchsorted(each, self.texts)])

    def _find_held_out(self) -> None:
        """The paragraphs that TRAIN must not have."""
        held = [np.zeros(0, dtype=np.uint64)]
        for chunk in self.chunks:
            if (mine := self.splits_of(chunk) == VAL).any():
                held.append(chunk.chunk.array("paragraphs")[mine[chunk.chunk.array("paragraph_of")]])
        self.held_out = np.unique(np.concatenate(held))


def clean_corpus(
    work: Path, *, read: Sources, options: PrepareOptions, maximum: int, workers: Workers, progress: Progress
) -> Corpus:
    """Read, clean, deduplicate and split everything. Raises DataError, ResourceError."""
    counts: Counter[str] = Counter()
    total = sum(source.size_bytes for source in read.all)
    batches: list[tuple[str, NDArray[np.uint32], NDArray[np.uint32], int]] = []

    def calls() -> Iterator[Call | None]:
        for batch in _batches(read, counts):
            payload = b"".join(batch.texts)
            job = batch.job(options, maximum=maximum)
            key = key_of(str(RECIPE), repr(asdict(job)), payload)
            sources_of, numbers_of = (np.array(each, dtype=np.uint32) for each in (batch.sources, batch.numbers))
            batches.append((key, sources_of, numbers_of, batch.num_bytes))
            yield None if is_whole(work / f"{key}.clean") else (clean_texts, (job, payload))

    progress(CLEANING, 0, total)
    chunks: list[CleanChunk] = []
    sources: list[NDArray[np.uint32]] = []
    texts: list[NDArray[np.uint32]] = []
    dropped: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    done = first = 0
    names = [source.name for source in read.all]
    for number, made in enumerate(workers.run(calls())):
        key, source_of, number_of, num_bytes = batches[number]
        path = work / f"{key}.clean"
        if made:
            write_chunk(path, made)
        chunk = Chunk(path)
        header = chunk.header
        of_text = chunk.array("of_text")
        sources.append(source_of[of_text])
        texts.append(number_of[of_text])
        chunks.append(CleanChunk(key, chunk, first, len(sources[-1])))
        first += len(sources[-1])
        counts.update(header["counts"])
        for row in header["dropped"]:
            if len(dropped[row["reason"]]) < DROPPED_SAMPLES:
                dropped[row["reason"]].append({**row, "source": names[source_of[row.pop("text")]]})
        done += num_bytes
        progress(CLEANING, min(done, total), total)
    progress(CLEANING, total, total)
    corpus = Corpus(chunks, sources=sources, texts=texts)
    corpus.dropped = [row for rows in dropped.values() for row in rows]
    corpus.drop_duplicates(similarity=options.near_duplicates, names=names, progress=progress)
    corpus.counts.update(counts + read.log.counts)
    named = [number for number, source in enumerate(read.all) if source.is_held_out]
    corpus.split(options.val_fraction, named=np.array(named, dtype=np.uint32))
    return corpus


def documents_of(read: Sources) -> Iterator[tuple[int, str]]:
    """(number of the source, document) of everything, clean. Raises DataError."""
    counts: Counter[str] = Counter()
    for piece, section in _sections(read, counts):
        for text in clean.documents(section, keep_indentation=piece.keeps_indentation, counts=counts):
            yield piece.source, text


def _sections(read: Sources, counts: Counter[str]) -> Iterator[tuple[TextPiece, str]]:
    """The sections of every text, each with a piece of that text."""
    for _, pieces in groupby(read.read(), key=lambda piece: piece[:2]):
        first = next(pieces)
        for section in clean.sections((piece.text for piece in chain([first], pieces)), counts):
            yield first, section


def _batches(read: Sources, counts: Counter[str]) -> Iterator[_Batch]:
    batch: _Batch | None = None
    for piece, section in _sections(read, counts):
        source = read.all[piece.source]
        if batch and batch.source is not source and _begins_batch(source, batch):
            yield batch
            batch = None
        batch = batch or _Batch(source=source)
        batch.source = source
        batch.add(piece, section)
        if batch.num_bytes >= clean.SECTION_CHARACTERS:
            yield batch
            batch = None
    if batch:
        yield batch


def _begins_batch(source: TextSource, batch: _Batch) -> bool:
    """Whether a new batch begins before `source`; small files share one, with ends that more files do not move."""
    large = max(source.size_bytes, batch.source.size_bytes) > SMALL_SOURCE_BYTES
    is_alike = bool(source.num_stories) == bool(batch.source.num_stories)
    return large or not is_alike or zlib.crc32(source.name.encode()) % 16 == 0


def _band(chunk: CleanChunk, band: int) -> NDArray[np.uint64]:
    found = chunk.chunk.array(f"band{band}")
    return duplicates.band_keys(found) if found.shape[1] else np.zeros(chunk.count, dtype=np.uint64)


def _joined(arrays: list[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return np.concatenate([np.zeros((0, *arrays[0].shape[1:]) if arrays else 0, dtype=dtype), *arrays])
