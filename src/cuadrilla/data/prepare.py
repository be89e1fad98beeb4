"""Text in, data folder out: sources → clean documents → split → tokenizer → tokens.

Invariants
* A folder is valid once it has a manifest, which is written last. All work happens in `.work` inside it. After an
  interruption the folder is as it was before, or has no manifest. The same command then begins anew.
* The same inputs and options give the same bytes: on any machine, with any number of processes, in any order of
  arguments or directory listing, interrupted or not.
* A finished folder is left alone if inputs and options are the same and its files are there. Otherwise it is replaced
  only with `force`. Only one preparation runs at a time: the file `lock` names its process.

Memory: about 40 bytes for each document, and two batches of a megabyte of text for each process. The tokenizer learns
from at most `TOKENIZER_CHARACTERS` characters, chosen by hash.
"""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.corpus import RECIPE, SPLITS, CleanChunk, Corpus, make_corpus
from cuadrilla.data.executor import in_order, processes
from cuadrilla.data.folder import (
    MANIFEST,
    TOKENIZER,
    TOKENS,
    Manifest,
    Option,
    Source,
    Split,
    dtype_for,
    publish,
    read_manifest,
    verify_folder,
)
from cuadrilla.data.formats.files import ACCEPTED
from cuadrilla.data.sources import DEFAULT_FIELD, Progress, Sources, list_sources
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.host.facts import read_facts
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, file_sha256, storage_errors

MIN_CORPUS_CHARACTERS = 1_000
TOKENIZER_CHARACTERS = 10**8
SMALL_BYTES = 2**21
"""Less text than this is cleaned in this process: starting others would take longer."""
WORK = ".work"
TRAINING, WRITING = Message("training the tokenizer"), Message("writing tokens")
ENCODING_THREADS = 2
"""While one thread encodes (on all cores), the other one does its work in Python."""
DEFAULT_VOCAB = 8192
DEFAULT_VAL_FRACTION = 0.05


class OtherTextError(DataError):
    """The folder was prepared from other text, or with other options."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    vocab: int = DEFAULT_VOCAB
    """Tokens of the vocabulary to train."""
    tokenizer: Path | None = None
    """Use this `tokenizer.json` instead of training one."""
    val_fraction: float = DEFAULT_VAL_FRACTION
    """Above 0, at most 0.5."""
    field: str = DEFAULT_FIELD
    """The field or column of a record that holds its text."""
    keep_all: bool = False
    """Drop only very short and equal documents: keep near-duplicates, and text that is unlike any book."""
    force: bool = False
    """Replace a folder that was prepared from other inputs."""
    processes: int | None = None
    """Processes, or workers of the executor. None: one for each core of this machine."""

    def recorded(self, tokenizer: Tokenizer | None) -> dict[str, Option]:
        """The options that decide the bytes of the folder, as the manifest stores them."""
        return {
            **({"tokenizer": tokenizer.sha256()} if tokenizer else {"vocab": self.vocab}),
            "field": self.field,
            "recipe": RECIPE,
            "val_fraction": self.val_fraction,
            "keep_all": int(self.keep_all),
        }


@dataclass(frozen=True, kw_only=True)
class Prepared:
    manifest: Manifest
    already: bool
    """Nothing was done, because the folder already holds this preparation."""
    skipped: Sequence[str] = ()
    """Files in the given folders that are not text."""
    note: str = ""
    """What was held out, and by which rule."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def prepare(
    specs: Sequence[str],
    *,
    out: Path,
    options: PrepareOptions,
    progress: Progress = no_progress,
    executor: Executor | None = None,
) -> Prepared:
    """Prepare `specs` (files, folders, `cuentos:N`) into the data folder `out`. The `executor` runs the jobs; by
    default processes of this machine do.

    Raises DataError (text), ConfigError (options, folder in use), ResourceError (disk).
    """
    sources = list_sources(specs, exclude=out, field=options.field)
    if not sources.all:
        raise DataError(
            "there is no text in {names}",
            names=", ".join(specs),
            hint="put your text there ({accepted}), or give the built-in source cuentos:40000",
            accepted=ACCEPTED,
        )
    tokenizer = Tokenizer.load(options.tokenizer) if options.tokenizer else None
    work = out / WORK
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with FolderLock(out / "lock"):
            wanted = options.recorded(tokenizer)
            done = None if options.force else _finished(out, sources, wanted)
            shutil.rmtree(work, ignore_errors=True)  # from a preparation that was killed
            if done:
                return Prepared(manifest=done, already=True)
            with storage_errors(work):
                work.mkdir()
            try:
                small = sum(source.size_bytes for source in sources.all) < SMALL_BYTES
                count = 1 if small else options.processes or max(1, int(read_facts().cores))
                with nullcontext(executor) if executor else processes(count) as jobs:
                    corpus = make_corpus(
                        work,
                        read=sources,
                        val_fraction=options.val_fraction,
                        keep_all=options.keep_all,
                        run=partial(in_order, jobs, ahead=2 * count),
                        progress=progress,
                    )
                manifest = _written(work, corpus, sources, tokenizer, options=wanted, progress=progress)
                publish(work, out, manifest)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    finally:
        with suppress(OSError):  # removes the folder only if it is empty
            out.rmdir()
    return Prepared(manifest=manifest, already=False, skipped=sorted(sources.skipped), note=corpus.note)


def _finished(out: Path, sources: Sources, wanted: dict[str, Option]) -> Manifest | None:
    """The manifest if `out` already holds this preparation, with all its files; None if it must be made.

    Raises DataError if making it would overwrite anything else.
    """
    if not (out / MANIFEST).exists():
        others = sorted(path.name for path in out.iterdir() if path.name != "lock")
        if others and WORK not in others:
            raise DataError(
                "{out} is not empty and not a data folder: it holds {name}",
                out=out,
                name=others[0],
                hint="name a new folder with --out, or use --force to write into this one",
            )
        return None
    manifest = read_manifest(out)
    has = [(source.name, source.sha256) for source in manifest.sources]
    if manifest.options != wanted or has != [(source.name, source.sha256) for source in sources.all]:
        raise OtherTextError(
            "{out} was already prepared from other text, or with other options",
            out=out,
            hint="name a new folder with --out, or replace this one with --force; "
            "its tokenizer stays with --tokenizer {tokenizer}",
            tokenizer=out / TOKENIZER,
        )
    try:
        verify_folder(out, manifest)
    except DataError:
        return None
    return manifest


def _written(
    work: Path,
    corpus: Corpus,
    sources: Sources,
    tokenizer: Tokenizer | None,
    *,
    options: dict[str, Option],
    progress: Progress,
) -> Manifest:
    """Write tokenizer and tokens into `work`. Raises DataError if there is too little text."""
    if corpus.num_characters < MIN_CORPUS_CHARACTERS or len(corpus) < 2:
        raise DataError(
            "too little text after cleaning: {characters:,} characters, documents or parts of them: {documents}; the "
            "minimum is {least:,} characters and 2 of them",
            characters=corpus.num_characters,
            documents=len(corpus),
            least=MIN_CORPUS_CHARACTERS,
            hint="add more text, or the source cuentos:40000; `data prepare --keep-all` keeps what was dropped",
        )
    if tokenizer is None:
        progress(TRAINING, 0, 0)
        texts = corpus.train_texts(max_characters=TOKENIZER_CHARACTERS)
        tokenizer = Tokenizer.train(texts, vocab_size=int(options["vocab"]))
    tokenizer.save(work / TOKENIZER)
    splits = _write_tokens(work, corpus, tokenizer, progress=progress)
    documents = corpus.documents_of_sources(len(sources.all))
    return Manifest(
        tokenizer_sha256=tokenizer.sha256(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype_for(tokenizer.vocab_size),
        end_of_text=tokenizer.end_of_text,
        splits=splits,
        sources=tuple(
            Source(
                name=source.name,
                sha256=source.sha256,
                num_bytes=source.num_bytes,
                encoding=source.encoding,
                licence=source.licence,
                documents=given,
            )
            for source, given in zip(sources.all, documents, strict=True)
        ),
        counts={name: count for name, count in sorted(corpus.counts.items()) if count},
        options=options,
    )


def _write_tokens(work: Path, corpus: Corpus, tokenizer: Tokenizer, *, progress: Progress) -> dict[str, Split]:
    """Encode every document and write the tokens into `work`. Raises ResourceError."""
    dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
    calls = (partial(_encode, chunk, corpus, tokenizer, dtype) for chunk in corpus.chunks)
    with storage_errors(work), ExitStack() as stack:
        threads = ThreadPoolExecutor(ENCODING_THREADS)
        stack.callback(threads.shutdown, cancel_futures=True)
        files = {split: stack.enter_context(open(work / TOKENS[name], "wb")) for split, name in SPLITS.items()}
        for done, encoded in enumerate(in_order(threads, calls, ahead=2 * ENCODING_THREADS)):
            progress(WRITING, done, len(corpus.chunks))
            for split, ids in encoded.items():
                files[split].write(ids.tobytes())
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    made: dict[str, Split] = {}
    for split, name in SPLITS.items():
        path, sizes = work / TOKENS[name], corpus.sizes[corpus.splits == split]
        made[name] = Split(
            num_tokens=path.stat().st_size // dtype.itemsize,
            num_bytes=int(sizes.sum()),
            num_documents=len(sizes),
            sha256=file_sha256(path),
        )
    return made


def _encode(chunk: CleanChunk, corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> dict[int, NDArray[Any]]:
    texts = list(chunk.texts())
    splits = corpus.splits[chunk.first : chunk.first + len(texts)]
    return {split: tokenizer.packed(list(compress(texts, splits == split))).astype(dtype) for split in SPLITS}
