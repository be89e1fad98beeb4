"""The last stage of a preparation: documents to token shards, encoded by all processes, written by one in order."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.chunks import Chunk, is_whole, key_of, write_chunk
from cuadrilla.data.corpus import CleanChunk, Corpus
from cuadrilla.data.executor import Call, Workers
from cuadrilla.data.shards import SPLITS, TOKENIZER, Portion, ShardWriter, Split, dtype_for
from cuadrilla.data.sources import Progress
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.data.work import DROP, TRAIN, EncodeJob, encode_documents
from cuadrilla.messages import Message

WRITING = Message("writing tokens")
_MEASURES = ("characters", "sizes", "lengths")
"""Arrays of a chunk that are summed by source: characters, bytes, tokens."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the shards hold."""

    splits: dict[str, Split]
    portions: dict[int, dict[str, Portion]]
    """By number of the source."""
    counts: Counter[str]


def write_tokens(work: Path, *, corpus: Corpus, tokenizer: Tokenizer, workers: Workers, progress: Progress) -> Written:
    """Encode every document and write the shards into `work`. Raises ResourceError."""
    dtype = dtype_for(tokenizer.vocab_size)
    writers = {split: ShardWriter(work, split=split, dtype=dtype) for split in SPLITS}
    sums: dict[tuple[int, str], NDArray[np.int64]] = {}
    counts: Counter[str] = Counter()
    chunks = [chunk for chunk in corpus.chunks if (corpus.splits_of(chunk) != DROP).any()]
    paths: list[Path] = []

    def calls() -> Iterator[Call | None]:
        tokenizer_file = workers.share(work / TOKENIZER)
        for chunk in chunks:
            job = _job(chunk, corpus, tokenizer)
            key = key_of(chunk.key, job.tokenizer_sha256, job.splits, job.held_out)
            paths.append(work / f"{key}.tokens")
            clean = work / f"{chunk.key}.clean"
            is_done = is_whole(paths[-1])
            yield None if is_done else (encode_documents, (job, workers.share(clean), tokenizer_file))

    progress(WRITING, 0, len(chunks))
    for number, made in enumerate(workers.run(calls())):
        if made:
            write_chunk(paths[number], made)
        encoded = Chunk(paths[number])
        _append(encoded, chunks[number], corpus, writers=writers, sums=sums)
        counts["train_paragraphs_in_val"] += encoded.header["removed"]
        progress(WRITING, number + 1, len(chunks))
    splits = {}
    for split, writer in writers.items():
        rows = [row for (_, name), row in sums.items() if name == split]
        documents, _, num_bytes, _ = np.sum(rows, axis=0).tolist() if rows else (0, 0, 0, 0)
        splits[split] = Split(
            shards=writer.close(), num_tokens=writer.num_tokens, num_bytes=num_bytes, num_documents=documents
        )
    portions: dict[int, dict[str, Portion]] = {}
    for (source, split), row in sorted(sums.items()):
        documents, characters, num_bytes, tokens = row.tolist()
        portions.setdefault(source, {})[split] = Portion(
            num_documents=documents, num_characters=characters, num_bytes=num_bytes, num_tokens=tokens
        )
    return Written(splits=splits, portions=portions, counts=counts)


def _job(chunk: CleanChunk, corpus: Corpus, tokenizer: Tokenizer) -> EncodeJob:
    return EncodeJob(
        splits=corpus.splits_of(chunk).tobytes(),
        held_out=corpus.removed_from(chunk).tobytes(),
        tokenizer_sha256=tokenizer.sha256(),
        dtype=dtype_for(tokenizer.vocab_size),
    )


def _append(
    encoded: Chunk,
    chunk: CleanChunk,
    corpus: Corpus,
    *,
    writers: dict[str, ShardWriter],
    sums: dict[tuple[int, str], NDArray[np.int64]],
) -> None:
    documents = encoded.array("documents")
    is_train = corpus.splits_of(chunk)[documents] == TRAIN
    sources = corpus.sources[chunk.first + documents]
    measures = np.stack([encoded.array(name).astype(np.int64) for name in _MEASURES])
    ids = encoded.array("ids")
    for split, mine in (("train", is_train), ("val", ~is_train)):
        if not mine.any():
            continue
        writers[split].append(ids if mine.all() else ids[np.repeat(mine, measures[-1])])
        for source in np.unique(sources[mine]).tolist():
            chosen = mine & (sources == source)
            row = sums.setdefault((source, split), np.zeros(4, dtype=np.int64))
            row += (np.count_nonzero(chosen), *measures[:, chosen].sum(axis=1))
