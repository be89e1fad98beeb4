"""Text in, data folder out: sources → clean documents → split → tokenizer → shards.

Invariants
* The folder is accepted by its manifest, written last. All work is done in `.work` inside it; interrupted at any
  instant, the folder is either as it was before, or has no manifest. The same command then goes on: what is in `.work`
  is named by what it was made from, and verified.
* The same inputs and options give the same bytes, on any machine, with any number of processes, in any order of
  arguments or directory listing, whether interrupted or not.
* A finished folder is left alone when inputs and options are the same and its files are intact; it is replaced only
  with `force`. One preparation at a time: the file `lock` names its process.

Memory: some 44 bytes for each document, two batches of a megabyte of text for each process, one shard for each split;
the tokenizer learns from at most `TOKENIZER_CHARACTERS`, chosen by hash.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuadrilla.data import clean, overlap
from cuadrilla.data.chunks import key_of
from cuadrilla.data.corpus import Corpus, clean_corpus
from cuadrilla.data.executor import Workers, available_cores, processes
from cuadrilla.data.formats.files import ACCEPTED
from cuadrilla.data.options import PrepareOptions, recorded
from cuadrilla.data.shards import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    Option,
    Portion,
    Source,
    Split,
    dtype_for,
    publish,
    read_manifest,
    verify_folder,
)
from cuadrilla.data.sources import Progress, Sources, list_sources
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.data.tokens import write_tokens
from cuadrilla.errors import ConfigError, DataError
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, storage_errors, write_atomic

MIN_CORPUS_CHARACTERS = 1_000
TOKENIZER_CHARACTERS = 10**8
SMALL_BYTES = 2**21
"""Less text than this is not worth starting processes for."""
WORK = ".work"
DROPPED = "dropped.jsonl"
CHECKED, OVERLAPPING = "val_windows_checked", "val_windows_in_train"
"""Counts of a manifest: stretches of the held-out text that were looked up in the training text, and found."""

_BLOCK_SIZES = (clean.MAX_DOCUMENT, 2_000, 200)
_OURS = rf"{re.escape(TOKENIZER)}|{re.escape(DROPPED)}|lock|(train|val)-\d+\.bin|\..*"  # what an interruption may leave


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The outcome of a preparation."""

    manifest: Manifest
    already: bool
    """Nothing was done: the folder holds this very preparation."""
    skipped: Sequence[str] = ()
    """Files in the given folders that are not text."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Files that were left out because they are broken, and why."""
    note: str = ""
    """What was held out, and why so."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One preparation that must be done."""

    work: Path
    sources: Sources
    options: PrepareOptions
    tokenizer: Tokenizer | None
    workers: Workers
    progress: Progress


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def prepare(
    specs: Sequence[str],
    *,
    out: Path,
    options: PrepareOptions,
    progress: Progress = no_progress,
    workers: Workers | None = None,
) -> Prepared:
    """Prepare `specs` (files, folders, `cuentos:N`) into the data folder `out`. `workers` do the jobs, else processes
    of this machine.

    Raises DataError (text), ConfigError (options, folder in use), ResourceError (disk).
    """
    sources = list_sources(specs, exclude=out, reading=options.reading, held_out=options.val)
    if not sources.all and not sources.log.broken:
        raise DataError(
            "there is no text in {names}",
            names=", ".join([*specs, *map(str, options.val)]),
            hint="put your text there ({accepted}), or give the built-in source cuentos:40000",
            accepted=ACCEPTED,
        )
    tokenizer = Tokenizer.load(options.tokenizer) if options.tokenizer else None
    is_new = not out.exists()
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with FolderLock(out / "lock", purpose="data prepare"):
            done = None
            if not options.force and _is_prepared(out):
                done = _finished(out, sources, recorded(options, tokenizer, sources))
            if done:
                shutil.rmtree(out / WORK, ignore_errors=True)  # of a later preparation that was killed
                return Prepared(manifest=done, already=True)
            num_bytes = sum(source.size_bytes for source in sources.all)
            count = 1 if num_bytes < SMALL_BYTES else options.processes or available_cores()
            with (
                _work_folder(out) as work,
                nullcontext(workers) if workers else processes(count) as chosen,
            ):
                task = _Task(
                    work=work, sources=sources, options=options, tokenizer=tokenizer, workers=chosen, progress=progress
                )
                return _prepare_locked(task, out)
    finally:
        if is_new:
            with suppress(OSError):  # not empty: it worked, or can go on
                out.rmdir()


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """Where unfinished work is. It stays after an interruption; text that cannot be prepared leaves none."""
    work = out / WORK
    with storage_errors(work):
        work.mkdir(exist_ok=True)
    try:
        yield work
    except (DataError, ConfigError):
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        with suppress(OSError):
            work.rmdir()  # empty: it did not even begin


def _prepare_locked(task: _Task, out: Path) -> Prepared:
    corpus = _clean(task)
    tokenizer = task.tokenizer or _train(task, corpus)
    tokenizer.save(task.work / TOKENIZER)
    written = write_tokens(task.work, corpus=corpus, tokenizer=tokenizer, workers=task.workers, progress=task.progress)
    if not written.splits["val"].num_tokens:
        raise DataError("no text is left of what --val names", hint="it may be too short, or --filter may drop it")
    if not written.splits["train"].num_tokens:
        raise DataError("no text is left to train on: all of it is also held out", hint="add more text")
    counts = corpus.counts + written.counts + _overlap(task, written.splits, tokenizer)
    manifest = Manifest(
        tokenizer_sha256=tokenizer.sha256(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype_for(tokenizer.vocab_size),
        end_of_text=tokenizer.end_of_text,
        splits=written.splits,
        sources=_describe(task.sources, written.portions),
        counts={name: count for name, count in sorted(counts.items()) if count},
        options=recorded(task.options, task.tokenizer, task.sources),
    )
    publish(task.work, out, manifest)
    _write_dropped(out, corpus.dropped)
    shutil.rmtree(task.work, ignore_errors=True)
    log = task.sources.log
    return Prepared(manifest=manifest, already=False, skipped=log.skipped, broken=log.broken, note=corpus.note)


def _overlap(task: _Task, splits: dict[str, Split], tokenizer: Tokenizer) -> Counter[str]:
    """How much of the held-out text is in the training text all the same."""
    task.progress(Message("comparing the splits"), 0, 0)
    dtype = dtype_for(tokenizer.vocab_size)
    width = overlap.window_tokens(splits["train"].num_bytes / splits["train"].num_tokens)
    train, val = (
        overlap.blocks(task.work, splits[name].shards, dtype=dtype, overlap=width - 1) for name in ("train", "val")
    )
    found = overlap.measure(val, train, name="val", width=width, end_of_text=tokenizer.end_of_text)
    return Counter({CHECKED: found.checked, OVERLAPPING: found.found})


def _write_dropped(out: Path, rows: list[dict[str, Any]]) -> None:
    """Examples of what was dropped, beside the data and no part of it."""
    if rows:
        write_atomic(out / DROPPED, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        (out / DROPPED).unlink(missing_ok=True)


def _is_prepared(out: Path) -> bool:
    """Whether there is a manifest. Raises DataError if `out` holds anything that is not ours."""
    if (out / MANIFEST).exists():
        return True
    if foreign := sorted(path.name for path in out.iterdir() if not re.fullmatch(_OURS, path.name)):
        raise DataError(
            "{out} is not empty and not a data folder: it holds {name}",
            out=out,
            name=foreign[0],
            hint="name a new folder with --out, or use --force to write into this one",
        )
    return False


def _finished(out: Path, sources: Sources, wanted: dict[str, Option]) -> Manifest | None:
    """The manifest if `out` is this very preparation, intact; None if it must be (re)done.

    Raises DataError if `out` holds anything else that would be overwritten.
    """
    manifest = read_manifest(out)
    has = [(source.name, source.sha256) for source in manifest.sources]
    gets = [(source.name, source.sha256) for source in sources.all]
    had = manifest.options
    differs = [key for key in sorted({*had, *wanted}) if had.get(key) != wanted.get(key)]
    if differs or has != gets:
        raise DataError(
            "{out} was already prepared with another {option}"
            if differs
            else "{out} was already prepared from other text",
            out=out,
            option="".join(differs[:1]).replace("_", " "),
            hint="name a new folder with --out, or replace this one with --force; "
            "its tokenizer stays with --tokenizer {tokenizer}",
            tokenizer=out / TOKENIZER,
        )
    try:
        verify_folder(out, manifest, hashes=True)
    except DataError:
        return None
    return manifest


def _clean(task: _Task) -> Corpus:
    """Clean, deduplicate and split. Raises DataError if too little is left."""
    for maximum in _BLOCK_SIZES:
        corpus = clean_corpus(
            task.work,
            read=task.sources,
            options=task.options,
            maximum=maximum,
            workers=task.workers,
            progress=task.progress,
        )
        if len(corpus) >= 2:
            break
    if corpus.num_characters < MIN_CORPUS_CHARACTERS or len(corpus) < 2:
        raise DataError(
            "too little text: {characters:,} characters in {documents} documents after cleaning; "
            "the minimum is {least:,} characters in 2 documents",
            characters=corpus.num_characters,
            documents=len(corpus),
            least=MIN_CORPUS_CHARACTERS,
            hint="add more text, or the built-in source cuentos:40000; --filter none keeps what was dropped",
        )
    return corpus


def _train(task: _Task, corpus: Corpus) -> Tokenizer:
    """A tokenizer for this corpus; the one of an interrupted preparation if it is there."""
    vocab_size = task.options.vocab
    key = key_of(str(vocab_size), *(chunk.key for chunk in corpus.chunks), corpus.splits.tobytes())
    path = task.work / f"{key}.tokenizer.json"
    if path.exists():
        return Tokenizer.load(path)
    task.progress(Message("training the tokenizer"), 0, 0)
    texts = corpus.train_texts(max_characters=TOKENIZER_CHARACTERS)
    tokenizer = Tokenizer.train(texts, vocab_size=vocab_size)
    tokenizer.save(path)
    return tokenizer


def _describe(sources: Sources, portions: dict[int, dict[str, Portion]]) -> tuple[Source, ...]:
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
        for number, source in enumerate(sources.all)
    )
