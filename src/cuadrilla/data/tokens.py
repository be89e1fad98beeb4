"""The last stage of a preparation: documents to token shards, encoded by all processes, written by one in order."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.chunks import Chunk, is_whole, key_of, open_chunk
from cuadrilla.data.corpus import CleanChunk, Corpus
from cuadrilla.data.pool import Pool
from cuadrilla.data.shards import SPLITS, TOKENIZER, Portion, ShardWriter, Split, dtype_for
from cuadrilla.data.sources import Progress
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.data.work import DROP, TRAIN, EncodeJob, Job
from cuadrilla.messages import Message

WRITING = Message("writing tokens")
_MEASURES = ("characters", "sizes", "lengths")
"""Arrays of a chunk that are summed by source: characters, bytes, tokens."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the shards hold. `files`: names in the work folder that this preparation used."""

    splits: dict[str, Split]
    portions: dict[int, dict[str, Portion]]
    """By number of the source."""
    counts: Counter[str]
    files: set[str]


def write_tokens(
    work: Path, *, corpus: Corpus, tokenizer: Tokenizer, encoder: str, pool: Pool, progress: Progress
) -> Written:
    """Encode every document and write the shards into `work`. Raises ResourceError."""
    dtype = dtype_for(tokenizer.vocab_size)
    writers = {split: ShardWriter(work, split=split, dtype=dtype) for split in SPLITS}
    sums: dict[tuple[int, str], NDArray[np.int64]] = {}
    counts: Counter[str] = Counter()
    chunks = [chunk for chunk in corpus.chunks if (corpus.splits_of(chunk) != DROP).any()]
    paths: list[Path] = []

    def jobs() -> Iterator[tuple[Job, bytes] | None]:
        for chunk in chunks:
            job, payload = _job(work, chunk, corpus, tokenizer=tokenizer, encoder=encoder)
            paths.append(Path(job.out))
            yield None if is_whole(paths[-1]) else (job, payload)

    progress(WRITING, 0, len(chunks))
    for number, _ in enumerate(pool.run(jobs())):
        encoded = open_chunk(paths[number])
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
    return Written(splits=splits, portions=portions, counts=counts, files={path.name for path in paths})


def _job(
    work: Path, chunk: CleanChunk, corpus: Corpus, *, tokenizer: Tokenizer, encoder: str
) -> tuple[EncodeJob, bytes]:
    payload = corpus.splits_of(chunk).tobytes() + corpus.removed_from(chunk).tobytes()
    job = EncodeJob(
        out="",
        chunk=str(chunk.chunk.path),
        num_documents=chunk.count,
        tokenizer=str(work / TOKENIZER),
        tokenizer_sha256=tokenizer.sha256(),
        encoder=encoder,
        dtype=dtype_for(tokenizer.vocab_size),
    )
    key = key_of(chunk.key, tokenizer.sha256(), payload)  # not the encoder: its ids were found to be the same
    return EncodeJob(**{**asdict(job), "out": str(work / f"{key}.tokens")}), payload


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
