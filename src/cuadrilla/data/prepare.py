"""Text in, data folder out: sources → clean documents → split → tokenizer → shards.

Invariants
* The folder is accepted by its manifest, written last. All work is done in `.work` inside it; interrupted at any
  instant, the folder is either as it was before, or has no manifest. The same command then starts over.
* The same inputs and options give the same bytes, on any machine, in any order of arguments or directory listing.
* A finished folder is left alone when inputs and options are the same and its files are intact; it is replaced only
  with `force`. One preparation at a time: the file `lock` names its process.

Memory: 24 bytes and one hash (about 130 bytes in all) for each document, plus one shard for each split; the clean text
waits on disk, and the tokenizer learns from at most `TOKENIZER_CHARACTERS` of it, chosen by hash.
"""

import re
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data import clean
from cuadrilla.data.formats.record import Reading
from cuadrilla.data.shards import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Manifest,
    Option,
    Portion,
    ShardWriter,
    Source,
    Split,
    dtype_for,
    publish,
    read_manifest,
    verify_folder,
)
from cuadrilla.data.sources import AS_USUAL, Found, Progress, open_sources
from cuadrilla.data.tokenizer import MAX_VOCAB, MIN_VOCAB, Tokenizer
from cuadrilla.errors import ConfigError, DataError, ResourceError
from cuadrilla.rundir import FolderLock, storage_errors

RECIPE = 1
"""Raised when the same inputs and options would give other bytes; part of the options in a manifest."""
DEFAULT_VOCAB = 8192
DEFAULT_VAL_FRACTION = 0.05
DEFAULT_MIN_CHARACTERS = 20
MIN_CORPUS_CHARACTERS = 1_000
TOKENIZER_CHARACTERS = 10**8
BATCH_CHARACTERS = 2**21

_BLOCK_SIZES = (clean.MAX_DOCUMENT, 2_000, 200)
_OURS = rf"{re.escape(TOKENIZER)}|lock|(train|val)-\d+\.bin|\..*"  # what an interrupted preparation may leave


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may be asked of a preparation. Raises ConfigError for a value out of range."""

    vocab: int | None = None
    """Tokens of the vocabulary to train (None: 8192). Excludes `tokenizer`."""
    tokenizer: Path | None = None
    """Use this `tokenizer.json` instead of training one."""
    val_fraction: float = DEFAULT_VAL_FRACTION
    min_characters: int = DEFAULT_MIN_CHARACTERS
    """Drop documents that are shorter."""
    reading: Reading = AS_USUAL
    """How records are read."""
    force: bool = False
    """Replace a folder that was prepared from other inputs."""

    def __post_init__(self) -> None:
        if self.vocab is not None and self.tokenizer is not None:
            raise ConfigError("--vocab and --tokenizer exclude each other", hint="a given tokenizer has its own size")
        if self.vocab is not None and not MIN_VOCAB <= self.vocab <= MAX_VOCAB:
            raise ConfigError(
                f"--vocab {self.vocab} is out of range",
                hint=f"choose from {MIN_VOCAB} (the 256 bytes and the end of a text) to {MAX_VOCAB:,}",
            )
        if not 0 < self.val_fraction <= 0.5:
            raise ConfigError(
                f"--val-fraction {self.val_fraction} is out of range", hint="above 0, at most 0.5; 0.05 holds out 5 %"
            )
        if self.min_characters < 1:
            raise ConfigError(f"--min-characters {self.min_characters} is out of range", hint="1 or more")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The outcome of a preparation."""

    manifest: Manifest
    already: bool
    """Nothing was done: the folder holds this very preparation."""
    skipped: tuple[str, ...]
    """Files in the given folders that are not text."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def prepare(specs: Sequence[str], *, out: Path, options: Options, progress: Progress = no_progress) -> Prepared:
    """Prepare `specs` (files, folders, `cuentos:N`) into the data folder `out`.

    Raises DataError (text), ConfigError (options, folder in use), ResourceError (disk).
    """
    found = open_sources(specs, exclude=out, progress=progress, reading=options.reading)
    tokenizer = Tokenizer.load(options.tokenizer) if options.tokenizer else None
    wanted = _record(options, tokenizer)
    is_new = not out.exists()
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with FolderLock(out / "lock", purpose="data prepare"):
            done = None if options.force else _finished(out, found=found, wanted=wanted)
            if done:
                shutil.rmtree(out / ".work", ignore_errors=True)  # of a later preparation that was killed
                return Prepared(manifest=done, already=True, skipped=found.skipped)
            manifest = _prepare_locked(out, found=found, options=options, tokenizer=tokenizer, progress=progress)
        return Prepared(manifest=manifest, already=False, skipped=found.skipped)
    finally:
        if is_new:
            with suppress(OSError):  # not empty: it worked
                out.rmdir()


def _prepare_locked(
    out: Path, *, found: Found, options: Options, tokenizer: Tokenizer | None, progress: Progress
) -> Manifest:
    work = out / ".work"
    _check_space(out, found)
    try:
        with storage_errors(work):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
        manifest = _build(work, found=found, options=options, tokenizer=tokenizer, progress=progress)
        publish(work, out, manifest)
        return manifest
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _record(options: Options, tokenizer: Tokenizer | None) -> dict[str, Option]:
    """The options that decide the bytes, as the manifest keeps them."""
    chosen: dict[str, Option] = (
        {"tokenizer": tokenizer.sha256()} if tokenizer else {"vocab": options.vocab or DEFAULT_VOCAB}
    )
    reading: dict[str, Option] = {"field": options.reading.field, "skip_bad": int(options.reading.skip_bad)}
    return {
        **chosen,
        **(reading if options.reading != AS_USUAL else {}),
        "recipe": RECIPE,
        "val_fraction": options.val_fraction,
        "min_characters": options.min_characters,
    }


def _finished(out: Path, *, found: Found, wanted: dict[str, Option]) -> Manifest | None:
    """The manifest if `out` is this very preparation, intact; None if it must be (re)done.

    Raises DataError if `out` holds anything else that would be overwritten.
    """
    if not (out / MANIFEST).exists():
        names = sorted(path.name for path in out.iterdir())
        foreign = [name for name in names if not re.fullmatch(_OURS, name)]
        if foreign:
            raise DataError(
                f"{out} is not empty and not a data folder: it holds {foreign[0]}",
                hint="name a new folder with --out, or use --force to write into this one",
            )
        return None
    manifest = read_manifest(out)
    has = [(source.name, source.sha256) for source in manifest.sources]
    gets = [(source.name, source.sha256) for source in found.sources]
    differs = [key for key in sorted({*manifest.options, *wanted}) if manifest.options.get(key) != wanted.get(key)]
    if has != gets or differs:
        cause = f"with another {differs[0].replace('_', ' ')}" if differs else "from other text"
        raise DataError(
            f"{out} was already prepared {cause}", hint="name a new folder with --out, or replace this one with --force"
        )
    try:
        verify_folder(out, manifest, hashes=True)
    except DataError:
        return None
    return manifest


def _check_space(out: Path, found: Found) -> None:
    """The clean text and the tokens need about twice the size of the input while both exist."""
    needed = 2 * sum(source.num_bytes for source in found.sources) + 2**20
    free = shutil.disk_usage(out).free
    if free < needed:
        raise ResourceError(
            f"{out} has {free / 2**20:,.0f} MiB free, the preparation needs about {needed / 2**20:,.0f} MiB",
            hint="free some space or choose another disk with --out",
        )


class _Spool:
    """Clean documents, one after another in a file, with their hash, size and source in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hashes = array("Q")
        self.sizes = array("Q")
        self.sources = array("L")
        self.num_characters = 0

    def fill(self, found: Found, *, maximum: int, min_characters: int, progress: Progress) -> Counter[str]:
        """Read and clean every source, keep each distinct document once; what was dropped or repaired."""
        counts = Counter(found.counts)
        seen: set[bytes] = set()
        total = sum(source.num_bytes for source in found.sources)
        done = 0
        with storage_errors(self.path), open(self.path, "wb") as file:
            for number, text in _documents(found, maximum=maximum, counts=counts):
                key = clean.document_hash(text)
                if len(text) < min_characters:
                    counts["documents_too_short"] += 1
                elif key in seen:
                    counts["documents_duplicate"] += 1
                else:
                    seen.add(key)
                    raw = text.encode()
                    file.write(raw)
                    self.hashes.append(int.from_bytes(key[:8], "big"))
                    self.sizes.append(len(raw))
                    self.sources.append(number)
                    self.num_characters += len(text)
                done = min(total, done + len(text))
                progress("cleaning", done, total)
        progress("cleaning", total, total)
        return counts

    def __len__(self) -> int:
        return len(self.sizes)

    def texts(self) -> Iterator[str]:
        """The documents in order."""
        with open(self.path, "rb") as file:
            for size in self.sizes:
                yield file.read(size).decode()


def _documents(found: Found, *, maximum: int, counts: Counter[str]) -> Iterator[tuple[int, str]]:
    """(number of its source, document) of everything, in order."""
    for number, source in enumerate(found.sources):
        for pieces in source.texts():
            is_empty = True
            for text in clean.documents(
                pieces, keep_indentation=source.keeps_indentation, counts=counts, maximum=maximum
            ):
                is_empty = False
                yield number, text
            counts["texts_empty"] += is_empty


@dataclass(frozen=True, kw_only=True)
class _Corpus:
    """The clean documents with their split decided."""

    spool: _Spool
    is_val: NDArray[np.bool_]
    held_out: set[int]
    counts: Counter[str]

    def documents(self, *, count_removed: bool = False) -> Iterator[tuple[int, str, str]]:
        """(source, split, text) in order, without the held-out paragraphs of `train` and what they leave empty."""
        for number, text in enumerate(self.spool.texts()):
            if self.is_val[number]:
                yield self.spool.sources[number], "val", text
                continue
            kept, num_removed = clean.without_paragraphs(text, self.held_out)
            if count_removed and num_removed:
                self.counts["train_paragraphs_in_val"] += num_removed
            if kept.strip():
                yield self.spool.sources[number], "train", kept

    def training_sample(self) -> Iterator[str]:
        """`train` texts for the tokenizer: all, or about TOKENIZER_CHARACTERS of them chosen by hash."""
        share = min(1.0, TOKENIZER_CHARACTERS / max(1, sum(self.spool.sizes)))
        for _, split, text in self.documents():
            if split == "train" and (share == 1.0 or clean.document_hash(text)[15] < 256 * share):
                yield text


def _build(work: Path, *, found: Found, options: Options, tokenizer: Tokenizer | None, progress: Progress) -> Manifest:
    corpus = _clean_corpus(work, found=found, options=options, progress=progress)
    if tokenizer is None:
        progress("training the tokenizer", 0, 0)
        tokenizer = Tokenizer.train(corpus.training_sample(), vocab_size=options.vocab or DEFAULT_VOCAB)
    tokenizer.save(work / TOKENIZER)
    writers = {split: ShardWriter(work, split=split, dtype=dtype_for(tokenizer.vocab_size)) for split in SPLITS}
    portions = _write_tokens(corpus, tokenizer=tokenizer, writers=writers, progress=progress)
    splits = {}
    for split, writer in writers.items():
        parts = [portion[split] for portion in portions.values() if split in portion]
        splits[split] = Split(
            shards=writer.close(),
            num_tokens=writer.num_tokens,
            num_bytes=sum(part.num_bytes for part in parts),
            num_documents=sum(part.num_documents for part in parts),
        )
    return Manifest(
        tokenizer_sha256=tokenizer.sha256(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype_for(tokenizer.vocab_size),
        end_of_text=tokenizer.end_of_text,
        splits=splits,
        sources=_describe(found, portions),
        counts={name: count for name, count in sorted(corpus.counts.items()) if count},
        options=_record(options, tokenizer if options.tokenizer else None),
    )


def _describe(found: Found, portions: dict[int, dict[str, Portion]]) -> tuple[Source, ...]:
    return tuple(
        Source(
            name=source.name,
            sha256=source.sha256,
            num_bytes=source.num_bytes,
            encoding=source.encoding,
            licence=source.licence,
            num_documents=sum(portion.num_documents for portion in portions.get(number, {}).values()),
            portions=portions.get(number, {}),
        )
        for number, source in enumerate(found.sources)
    )


def _clean_corpus(work: Path, *, found: Found, options: Options, progress: Progress) -> _Corpus:
    """Clean, deduplicate and split. Raises DataError if too little is left."""
    for maximum in _BLOCK_SIZES:
        spool = _Spool(work / "documents")
        counts = spool.fill(found, maximum=maximum, min_characters=options.min_characters, progress=progress)
        if len(spool) >= 2:
            break
    if spool.num_characters < MIN_CORPUS_CHARACTERS or len(spool) < 2:
        dropped = counts["documents_too_short"]
        raise DataError(
            f"too little text: {spool.num_characters:,} characters in {len(spool)} documents after cleaning; "
            f"the minimum is {MIN_CORPUS_CHARACTERS:,} characters in 2 documents",
            hint=f"{dropped} documents were shorter than --min-characters {options.min_characters}"
            if dropped
            else "add more text, or the built-in source cuentos:40000",
        )
    hashes = np.frombuffer(spool.hashes, dtype=np.uint64)
    is_val = clean.split_documents(hashes, val_fraction=options.val_fraction)
    held_out = {
        key for number, text in enumerate(spool.texts()) if is_val[number] for key, _ in clean.long_paragraphs(text)
    }
    return _Corpus(spool=spool, is_val=is_val, held_out=held_out, counts=counts)


def _write_tokens(
    corpus: _Corpus, *, tokenizer: Tokenizer, writers: dict[str, ShardWriter], progress: Progress
) -> dict[int, dict[str, Portion]]:
    """Encode every document into its split; what each source (by number) gave to each split."""
    sums: dict[tuple[int, str], NDArray[np.int64]] = {}
    done, total = 0, sum(corpus.spool.sizes)
    progress("writing tokens", done, total)
    for batch in _batches(corpus.documents(count_removed=True)):
        encoded = tokenizer.encode_batch([text for _, _, text in batch])
        for (source, split, text), ids in zip(batch, encoded, strict=True):
            num_bytes = len(text.encode())
            writers[split].append([*ids, tokenizer.end_of_text])
            row = sums.setdefault((source, split), np.zeros(4, dtype=np.int64))
            row += (1, len(text), num_bytes, len(ids) + 1)
            done += num_bytes
        progress("writing tokens", min(done, total), total)
    progress("writing tokens", total, total)
    if not writers["train"].num_tokens:
        raise DataError("no text is left to train on: all of it is also held out", hint="add more text")
    portions: dict[int, dict[str, Portion]] = {}
    for (source, split), row in sorted(sums.items()):
        documents, characters, num_bytes, tokens = row.tolist()
        portions.setdefault(source, {})[split] = Portion(
            num_documents=documents, num_characters=characters, num_bytes=num_bytes, num_tokens=tokens
        )
    return portions


def _batches(documents: Iterator[tuple[int, str, str]]) -> Iterator[list[tuple[int, str, str]]]:
    """Runs of documents, about BATCH_CHARACTERS each."""
    batch: list[tuple[int, str, str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[2])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
