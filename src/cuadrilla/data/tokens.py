"""The last stage of a preparation: documents to token shards, encoded on all cores, written in order."""

from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data.corpus import TRAIN, VAL, CleanChunk, Corpus
from cuadrilla.data.executor import threads
from cuadrilla.data.shards import Portion, ShardWriter, Split, dtype_for
from cuadrilla.data.sources import Progress
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.messages import Message

WRITING = Message("writing tokens")
ENCODING_THREADS = 2
"""One encodes, on all cores, while the other one is held up by Python."""
NAMES = {TRAIN: "train", VAL: "val"}


def write_tokens(
    work: Path, corpus: Corpus, tokenizer: Tokenizer, *, num_sources: int, progress: Progress
) -> tuple[dict[str, Split], list[dict[str, Portion]]]:
    """Encode every document and write the shards into `work`: the splits, and what each source gave to them.

    Raises ResourceError.
    """
    dtype = dtype_for(tokenizer.vocab_size)
    writers = {split: ShardWriter(work, split=name, dtype=dtype) for split, name in NAMES.items()}
    sums = np.zeros((num_sources, 3, 4), dtype=np.int64)  # of documents, characters, bytes and tokens
    calls = (partial(_encode, chunk, corpus, tokenizer, dtype) for chunk in corpus.chunks)
    with threads(ENCODING_THREADS) as workers:
        for done, (encoded, added) in enumerate(workers.run(calls)):
            progress(WRITING, done, len(corpus.chunks))
            for split, ids in encoded.items():
                writers[split].append(ids)
            np.add.at(sums, *added)
    shards = {split: writer.close() for split, writer in writers.items()}
    totals = {split: portion_of(sums[:, split].sum(axis=0)) for split in NAMES}
    return {
        name: Split(
            shards=shards[split],
            num_tokens=totals[split].num_tokens,
            num_bytes=totals[split].num_bytes,
            num_documents=totals[split].num_documents,
        )
        for split, name in NAMES.items()
    }, [{name: portion_of(row[split]) for split, name in NAMES.items() if row[split].any()} for row in sums]


def _encode(
    chunk: CleanChunk, corpus: Corpus, tokenizer: Tokenizer, dtype: str
) -> tuple[dict[int, NDArray[Any]], tuple[Any, NDArray[np.int64]]]:
    """The ids for each split, and what to add to the sums where."""
    splits = corpus.splits_of(chunk)
    kept = np.flatnonzero(splits)
    texts = list(chunk.texts()) if len(kept) else []
    encoded = tokenizer.encode_batch([texts[number] for number in kept.tolist()])
    for ids in encoded:
        ids.append(tokenizer.end_of_text)
    of_split = {
        split: np.fromiter(chain.from_iterable(compress(encoded, splits[kept] == split)), dtype=dtype)
        for split in NAMES
    }
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    measures = (np.ones_like(lengths), chunk.array("characters")[kept], chunk.array("sizes")[kept], lengths)
    return of_split, ((corpus.sources[chunk.first + kept], splits[kept]), np.stack(measures, axis=1))


def portion_of(sums: NDArray[np.int64]) -> Portion:
    documents, characters, num_bytes, tokens = sums.tolist()
    return Portion(num_documents=documents, num_characters=characters, num_bytes=num_bytes, num_tokens=tokens)
